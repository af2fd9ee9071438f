"""Writing shards beside the engine: read the captured states, check, compress and store them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from aerie.common.errors import UnusableStates
from aerie.engine.captured import read_captured
from aerie.extraction.verdict import CheckedSample, StatesCheck
from aerie.extraction.work import LaneWork
from aerie.samples.shards import ShardPlan
from aerie.states.checks import check_states
from aerie.states.codec import checksum
from aerie.states.shard import Sample, Shard
from aerie.states.store import write_shard


class ShardWriter:
    """Writes shards whose samples are all computed or can be copied; used by writer threads.

    `beat` is called for each sample written: the engine may be waiting for these threads.
    """

    def __init__(self, work: LaneWork, verdict: StatesCheck, beat: Callable[[], None]):
        self.work, self.verdict, self.beat = work, verdict, beat
        self._arrived: dict[str, tuple[Path, int]] = {}
        self._loaded: dict[str, tuple[Sample, int]] = {}

    def add(self, identity: str, states: Path, chosen: int) -> None:
        """Take a sample's captured states and the token that the engine chose after it."""
        self._arrived[identity] = states, chosen

    def write(self, shard: ShardPlan, left_out: dict[str, str]) -> dict[str, str]:
        """Check and write a shard without the samples in `left_out` (sample → reason).

        If samples are wrong, nothing is written and they are returned with the reason. Raises
        `UnusableStates` if a second try cannot fix it.
        """
        wrong: dict[str, str] = {}
        samples: dict[str, Sample] = {}
        for identity in shard.samples:
            if identity in left_out:
                continue
            try:
                samples[identity] = self._load(identity)
            except UnusableStates as error:
                wrong[identity] = str(error)
        fresh = [
            CheckedSample(i, s.states[-1:], self._loaded[i][1])
            for i, s in samples.items()
            if i in self._loaded
        ]
        wrong |= self.verdict.check(shard.id, fresh)
        if not wrong and samples:
            reasons = {self.work.keys[i]: reason for i, reason in left_out.items()}
            found = list(samples.values())
            try:
                write_shard(self.work.store, shard.id, found, reasons, self.beat)
            except UnusableStates:
                wrong = self._find_wrong(samples)
                if not wrong:
                    raise
        self.verdict.forget(wrong)
        for identity in wrong or samples:
            self._loaded.pop(identity, None)
        return wrong

    def _load(self, identity: str) -> Sample:
        """The sample from memory, from what the engine captured, or from another shard.

        Raises `UnusableStates` if the states are not those of the sample.
        """
        if identity in self._loaded:
            return self._loaded[identity][0]
        if identity not in self._arrived:
            return self._copy(identity)
        sample = self.work.samples[identity]
        path, chosen = self._arrived.pop(identity)
        states, tokens = read_captured(path)
        if tokens.tolist() != sample.input_ids:
            raise UnusableStates("the engine saved the states of other tokens")
        # Shapes first: the teacher looks at the last state.
        check_states(states[-1:], tokens[-1:], self.work.store.convention)
        loaded = Sample(identity, tokens, states, sample.loss_mask)
        self._loaded[identity] = loaded, chosen
        return loaded

    def _copy(self, identity: str) -> Sample:
        key = self.work.keys[identity]
        path, number = self.work.found[key]
        try:
            with Shard(path) as other:
                there = [entry["key"] for entry in other.samples[number : number + 1]] == [key]
                sample = other.read(number) if there else None
        except UnusableStates:
            self.work.store.set_aside(path)
            raise
        if sample is None:
            raise UnusableStates(f"{path} was replaced meanwhile and lacks this sample")
        return replace(sample, id=identity)

    def _find_wrong(self, samples: dict[str, Sample]) -> dict[str, str]:
        """Samples that the store refuses: on their own, or because others have the same states."""
        wrong: dict[str, str] = {}
        twins: dict[str, str] = {}
        c = self.work.store.convention
        for identity, sample in samples.items():
            twin = twins.setdefault(checksum(sample.states), identity)
            if self.work.keys[twin] != self.work.keys[identity]:
                wrong[twin] = f"has the states of {identity}"
                wrong[identity] = f"has the states of {twin}"
            try:
                mask = sample.loss_mask if c.last_state == "supervised" else None
                check_states(sample.states, sample.tokens, c, mask)
            except UnusableStates as error:
                wrong[identity] = str(error)
        return wrong
