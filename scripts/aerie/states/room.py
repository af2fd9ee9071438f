"""Room on the disk for states, checked before they are computed."""

import contextlib

from aerie.common.errors import AerieError, InputError
from aerie.common.files import free_bytes
from aerie.states.shard import Shard
from aerie.states.store import Store


def measured_ratio(store: Store, shards: int = 32) -> float:
    """Stored bytes a bf16 byte in the first shards of the store, plus 5 %; 1 without shards."""
    stored = raw = 0
    for path in sorted(store.folder.glob("*.safetensors"))[:shards]:
        try:
            with Shard(path) as shard:
                raw += sum(s["tokens"] for s in shard.samples) * store.convention.bytes_per_token()
                stored += shard.size
        except AerieError:
            continue
    return min(1.0, 1.05 * stored / raw) if raw else 1.0


def check_room(store: Store, tokens: int, max_gib: float | None) -> None:
    """Raise `InputError` with the figures when the states of `tokens` tokens do not fit.

    They must fit on the store's disk and, with all states stored there, into `max_gib` GiB.
    """
    if not tokens:
        return
    ratio, c = measured_ratio(store), store.convention
    needed = tokens * c.bytes_per_token() * ratio
    free, root = free_bytes(store.folder), store.folder.parent
    figures = (
        f"the states of {tokens:,} tokens take {needed / 2**30:.2f} GiB ({len(c.layer_ids)} states "
        f"of {c.hidden_size} x 2 bytes a token, stored at {ratio:.2f} of that)"
    )
    way = (
        "extract fewer samples (corpus.limit), or remove shards that nothing uses "
        "(scripts/store.py gc)"
    )
    if needed > free:
        raise InputError(
            f"{figures}, and {free / 2**30:.2f} GiB are free at {root}: make room, {way}"
        )
    if max_gib is not None:
        stored = 0
        for path in root.rglob("*.safetensors"):
            with contextlib.suppress(FileNotFoundError):  # another run moves or collects it
                stored += path.stat().st_size
        if stored + needed > max_gib * 2**30:
            raise InputError(
                f"{figures}; with the {stored / 2**30:.2f} GiB in {root} that is more than "
                f"hidden_states.max_gib = {max_gib}: raise it, {way}"
            )
