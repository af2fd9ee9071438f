"""One lane of extraction: from samples and the store to the lane's manifest."""

import contextlib
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from aerie.common.errors import InputError
from aerie.common.leases import Leases
from aerie.common.progress import JobProgress
from aerie.config import Config
from aerie.engine.protocol import VerifierEngine
from aerie.engine.staging import Staging
from aerie.extraction.extractor import LaneCounts, LaneExtractor
from aerie.extraction.work import LaneWork, too_few
from aerie.samples.file import read_samples
from aerie.samples.shards import ShardList
from aerie.states.convention import Convention
from aerie.states.manifest import LaneManifest, LaneShard, ManifestConvention
from aerie.states.room import check_room
from aerie.states.store import Store, is_done
from aerie.states.teacher import Teacher
from aerie.verifier.fingerprint import Fingerprint


def extract_lane(
    settings: Config,
    verifier: Fingerprint,
    *,
    samples: Path,
    shards: Path,
    store_folder: Path,
    lane: int,
    output: Path,
    progress_log: Path | None,
) -> None:
    """Make the lane's missing shards and write its manifest to `output`.

    `settings`: the sections `hidden_states`, `samples`, `engine` and `verifier`. Raises
    `InputError` if the states do not fit on the disk or too few samples can be kept,
    `UnusableStates`, `EngineError`.
    """
    wanted = settings.hidden_states
    convention = Convention.of(verifier, wanted)
    store = Store(store_folder, convention)
    all_shards = ShardList.read(shards).shards
    work = LaneWork(store, read_samples(samples), all_shards[lane :: wanted.lanes])
    # Lanes side by side fill the same disk: what all of them lack has to fit.
    lacking = sum(s.tokens for s in all_shards if not is_done(store, s.id))
    check_room(store, lacking, wanted.max_gib)
    total = work.number_to_extract()
    start = time.monotonic()
    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(
            JobProgress("extract_hidden_states", total, "samples", progress_log)
        )
        staging = stack.enter_context(Staging(work.staging_bytes())) if total else None

        def start_engine() -> VerifierEngine:
            # Here, because importing vLLM takes 10 seconds.
            from aerie.engine.in_process import InProcessEngine

            return InProcessEngine(
                verifier.folder,
                settings.engine,
                max_model_len=settings.samples.max_length + 1,
                trust_remote_code=settings.verifier.trust_remote_code,
                capture_ids=list(convention.layer_ids),
                staging=staging.folder if staging else None,
                progress=progress,
            )

        counts = extract(
            work,
            start_engine,
            lambda: Teacher(verifier.folder),
            progress,
            staging_bytes=staging.limit if staging else 0,
            min_kept_share=wanted.min_kept_share,
        )
        counts.seconds = round(time.monotonic() - start, 1)
        progress.enter("finishing")
        manifest = describe_lane(work, counts, wanted.min_kept_share, progress.beat)
    manifest.write(output)


def extract(
    work: LaneWork,
    start_engine: Callable[[], AbstractContextManager[VerifierEngine]],
    load_teacher: Callable[[], Teacher],
    progress: JobProgress,
    *,
    staging_bytes: int,
    min_kept_share: float,
) -> LaneCounts:
    """Make the missing shards (see `LaneExtractor`); what was done for them."""
    with Leases() as leases:
        extractor = LaneExtractor(
            work, load_teacher, progress, leases, staging_bytes, min_kept_share
        )
        extractor.run(start_engine)
    return extractor.counts


def describe_lane(
    work: LaneWork,
    counts: LaneCounts,
    min_kept_share: float,
    beat: Callable[[], None] = lambda: None,
) -> LaneManifest:
    """The lane's manifest: its shards with sizes and checksums, and what was left out.

    `beat` is called for each shard: reading terabytes takes a while. Raises `InputError` if fewer
    than `min_kept_share` of the samples exist, or if a shard has disappeared.
    """
    entries, omitted = [], 0
    for shard in work.shards:
        path = work.store.path(shard.id)
        known = shard.id in work.present and path.is_file()
        if not known and not work.usable(shard):
            raise InputError(
                f"{path}: this shard was complete a moment ago and is not now; another program "
                "changes this store. Run again: the shard is made again"
            )
        beat()
        if shard.id not in work.present:
            continue
        found = work.present[shard.id]
        omitted += found.omitted_bytes
        entries.append(
            LaneShard(
                id=shard.id,
                file=path.name,
                split=shard.split,
                samples=found.samples,
                tokens=found.tokens,
                bytes=found.bytes,
                checksum=found.checksum,
            )
        )
    kept = sum(len(entry.samples) for entry in entries)
    if kept < min_kept_share * len(work.keys):
        raise too_few(work, work.left_out, min_kept_share)
    tokens = sum(entry.tokens for entry in entries)
    return LaneManifest(
        convention=ManifestConvention.of(work.store.convention),
        shards=entries,
        samples=kept,
        tokens=tokens,
        raw_bytes=tokens * work.store.convention.bytes_per_token(),
        omitted_bytes=omitted,
        bytes=sum(entry.bytes for entry in entries),
        quarantined=work.left_out,
        **vars(counts),
    )
