"""What a lane has to do: which of its shards are missing, and which samples can be copied."""

import os
from collections import deque
from dataclasses import dataclass

from aerie.common.errors import InputError, UnusableStates
from aerie.common.leases import lease_path
from aerie.samples.file import TokenizedSample
from aerie.samples.shards import ShardPlan
from aerie.states.facts import nothing_kept, read_facts
from aerie.states.shard import Shard
from aerie.states.store import Store


@dataclass(frozen=True)
class FoundShard:
    """An existing shard: the ids of its samples, their tokens, and what its manifest entry needs.

    `omitted_bytes`: of states that `last_state: supervised` leaves out. `bytes`, `checksum`: of
    the file.
    """

    samples: list[str]
    tokens: int
    omitted_bytes: int
    bytes: int
    checksum: str


class LaneWork:
    """What is in the store for a lane, and what is not.

    `missing`: shards that are absent, that somebody else is making, or that were damaged and have
    been moved aside. `found`: where other shards hold samples of these, by key: file and position.
    `present`: the existing shards by id. `left_out`: samples that the existing
    shards lack, with the reason. `keys`: the key of each sample by its id.
    """

    def __init__(self, store: Store, samples: dict[str, TokenizedSample], shards: list[ShardPlan]):
        self.store, self.samples, self.shards = store, samples, shards
        if unknown := [i for s in shards for i in s.samples if i not in samples]:
            raise InputError(
                f"samples/shards.json: {len(unknown)} of its samples are not in "
                f"samples/samples.parquet ({', '.join(unknown[:3])}); delete both files and run "
                "again"
            )
        self.keys = {
            i: store.key(samples[i].input_ids, samples[i].loss_mask)
            for s in shards
            for i in s.samples
        }
        self.present: dict[str, FoundShard] = {}
        self.left_out: dict[str, str] = {}
        leased = {p.name for p in store.folder.glob(".*.lease")}
        self.missing = [
            s for s in shards if lease_path(store.path(s.id)).name in leased or not self.usable(s)
        ]
        self.found = store.find_samples({self.keys[i] for s in self.missing for i in s.samples})

    def usable(self, shard: ShardPlan) -> bool:
        """Whether the shard exists and is the right one, or each of its samples was left out.

        Moves aside a shard that is not what its name says.
        """
        path = self.store.path(shard.id)
        if not os.path.lexists(path):
            reasons = nothing_kept(path)
            if not reasons or any(self.keys[i] not in reasons for i in shard.samples):
                return False
            self.left_out.update({i: reasons[self.keys[i]] for i in shard.samples})
            return True
        try:
            self._inspect(shard)
        except UnusableStates:
            self.store.set_aside(path)
            return False
        return True

    def _inspect(self, shard: ShardPlan) -> None:
        """Enter an existing shard into `present`; raise `UnusableStates` if it is the wrong one.

        Compares its header with this lane's convention and samples, and its size with the one it
        was written with. Its bytes are compared with their checksums whenever they are read.
        """
        path, c = self.store.path(shard.id), self.store.convention
        with Shard(path) as opened:
            if opened.convention.key != c.key:
                raise UnusableStates(f"{path}: made with another verifier, other layers or format")
            held = deque((s["key"], s["tokens"]) for s in opened.samples)
            omitted, size = opened.omitted_bytes(), opened.size
        facts = read_facts(path)
        if facts.bytes != size or facts.checksum is None:
            raise UnusableStates(f"{path}: found {size} bytes, expected {facts.bytes}")
        samples, tokens, left_out = [], 0, {}
        for identity in shard.samples:
            key = self.keys[identity]
            if held and held[0][0] == key:
                tokens += held.popleft()[1]
                samples.append(identity)
            elif key in facts.left_out:
                left_out[identity] = facts.left_out[key]
            else:
                raise UnusableStates(f"{path}: sample {identity} is not in it")
        if held:
            raise UnusableStates(f"{path}: contains samples that do not belong to it")
        self.left_out.update(left_out)
        self.present[shard.id] = FoundShard(samples, tokens, omitted, size, facts.checksum)

    def to_extract(self, shard: ShardPlan) -> list[TokenizedSample]:
        """The samples of a missing shard that no other shard holds, longest first.

        A long one at the end would leave the engine with little to compute beside it.
        """
        samples = [self.samples[i] for i in shard.samples if self.keys[i] not in self.found]
        return sorted(samples, key=lambda s: -len(s.input_ids))

    def number_to_extract(self) -> int:
        return sum(len(self.to_extract(shard)) for shard in self.missing)

    def number_to_copy(self) -> int:
        return sum(self.keys[i] in self.found for s in self.missing for i in s.samples)

    def states_bytes(self, sample: TokenizedSample) -> int:
        """Uncompressed size of a sample's states."""
        return len(sample.input_ids) * self.store.convention.bytes_per_token()

    def staging_bytes(self) -> int:
        """Space for the states of three missing shards: one computed, one written, one next."""
        sizes = [sum(self.states_bytes(self.samples[i]) for i in s.samples) for s in self.missing]
        return 3 * max(sizes, default=0)


def too_few(work: LaneWork, left_out: dict[str, str], min_kept_share: float) -> InputError:
    """The error of a lane in which too many samples are `left_out` (sample → reason)."""
    shown = "; ".join(f"{i}: {reason}" for i, reason in list(left_out.items())[:5])
    return InputError(
        f"{len(left_out)} of {len(work.keys)} samples could not be extracted, which leaves "
        f"fewer than hidden_states.min_kept_share = {min_kept_share}. {shown}. Samples that a "
        "finished shard left out are not tried again automatically; docs/runbook.md (Samples that "
        "were left out) describes how to try them again"
    )
