"""The teacher's check of captured states: do they lead to the tokens that the engine chose?"""

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from aerie.common.errors import UnusableStates
from aerie.states.store import Store
from aerie.states.teacher import (
    ENOUGH_SAMPLES,
    ENOUGH_TOKENS,
    Teacher,
    find_mismatched_samples,
    judge_ranks,
)


@dataclass(frozen=True)
class CheckedSample:
    """The end of a captured sample.

    `last_states`: bf16 [1, ids, hidden], those of the last token. `chosen`: the token that the
    verifier generated after it, greedily.
    """

    id: str
    last_states: torch.Tensor
    chosen: int


class StatesCheck:
    """Checks captured samples, shard by shard, from several threads.

    A single sample says little: bf16 arithmetic makes a few correct ones disagree. Samples of
    shards too small for a sure verdict are judged together, after these shards were written; if
    they are wrong, `set_aside` moves the shards away.
    """

    def __init__(self, store: Store, load_teacher: Callable[[], Teacher]):
        self.store = store
        self._load_teacher = load_teacher
        self._teacher: Teacher | None = None
        self._lock = threading.Lock()
        self._passed: set[str] = set()
        self._unsure: list[CheckedSample] = []
        self._unsure_shards: list[str] = []

    def check(self, shard: str, samples: list[CheckedSample]) -> dict[str, str]:
        """Samples whose states do not lead to the chosen token, with the reason.

        Samples that passed before are not checked again. Raises `UnusableStates` when so many
        disagree that the cause is not in the samples.
        """
        samples = [s for s in samples if s.id not in self._passed]
        if not samples:
            return {}
        with self._lock:
            if self._teacher is None:
                self._teacher = self._load_teacher()
            found = [(s.id, s.last_states, [s.chosen]) for s in samples]
            try:
                wrong = find_mismatched_samples(self._teacher, found, greedy=True)
            except UnusableStates as error:
                raise _all_wrong([shard], samples, error) from None
            passed = [s for s in samples if s.id not in wrong]
            if len(passed) < ENOUGH_TOKENS:
                # Clones, because a view would keep the whole sample in memory.
                self._unsure += [
                    CheckedSample(s.id, s.last_states.clone(), s.chosen) for s in passed
                ]
                self._unsure_shards.append(shard)
                self._judge_unsure(ENOUGH_TOKENS)
        self._passed.update(s.id for s in passed)
        return wrong

    def forget(self, samples: dict[str, str]) -> None:
        """Check these samples again when they come again."""
        self._passed.difference_update(samples)

    def finish(self) -> None:
        """Judge what is left, if it is enough. Raises `UnusableStates`."""
        self._judge_unsure(ENOUGH_SAMPLES)

    def _judge_unsure(self, least: int) -> None:
        if self._teacher is None or len(self._unsure) < least:
            return
        last = torch.cat([s.last_states[:, -1] for s in self._unsure])
        chosen = torch.tensor([s.chosen for s in self._unsure])
        try:
            judge_ranks(self._teacher.ranks(last, chosen), greedy=True)
        except UnusableStates as error:
            raise _all_wrong(self._unsure_shards, self._unsure, error) from None
        self._unsure, self._unsure_shards = [], []

    def set_aside(self) -> None:
        """Move away shards that were written before their verdict was sure."""
        for shard in self._unsure_shards:
            self.store.set_aside(self.store.path(shard))


def _all_wrong(shards: list[str], samples: list[CheckedSample], error: Exception) -> UnusableStates:
    return UnusableStates(
        f"{error} (shards {', '.join(shards[:3])}; samples "
        f"{', '.join(s.id for s in samples[:3])}, ...). None of these shards were kept. Check "
        "hidden_states.aux_layer_ids, and that the verifier's folder has not changed since its "
        "fingerprint was made"
    )
