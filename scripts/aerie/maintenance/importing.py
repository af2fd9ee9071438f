"""Importing states that another tool extracted into the store."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from aerie.common.errors import InputError
from aerie.common.files import digest
from aerie.common.progress import JobProgress
from aerie.maintenance.foreign import RefusedFile, find_files, read_foreign, read_tokens
from aerie.maintenance.foreign_checks import Mask, check_foreign, masks_of
from aerie.maintenance.references import IMPORTS, read_references
from aerie.states.codec import checksum
from aerie.states.convention import Convention
from aerie.states.facts import facts_path, file_checksum
from aerie.states.ids import sample_key, shard_id
from aerie.states.manifest import ImportManifest, ManifestConvention, ShardEntry
from aerie.states.shard import Sample, Shard
from aerie.states.store import Store
from aerie.states.teacher import Teacher
from aerie.verifier.compatibility import resolve_layer_ids
from aerie.verifier.fingerprint import FINGERPRINT, read_fingerprint

SHARD_BYTES = 1 << 30
"""Uncompressed bytes after which an imported shard ends."""

TWINS = "the same states as another file's of other tokens"


@dataclass(frozen=True)
class StatedLayout:
    """What the user states about the files. `layer_ids` in our counting, the number of layers
    last; `after_norm`: whether the last state is after the final norm; `greedy`: whether the
    supervised tokens are the verifier's own greedy choice."""

    layer_ids: tuple[int, ...]
    after_norm: bool
    greedy: bool

    @classmethod
    def of(
        cls, layer_ids: list[int], counting: str, num_layers: int, last_state: str, answers: str
    ) -> "StatedLayout":
        """From the command line. `layer_ids`: those that feed the drafter, in the files' order.

        `counting`: `entering` (k is the state entering layer k) or `output` (k is the output of
        layer k, our k+1: SGLang, SpecForge, TorchSpec). Raises `InputError`.
        """
        ours = [k + 1 for k in layer_ids] if counting == "output" else list(layer_ids)
        if ours != sorted(set(ours)):
            raise InputError(f"--layer-ids: found {layer_ids}, expected distinct ids in order")
        try:
            resolved = resolve_layer_ids(ours, num_layers)
        except InputError as error:
            raise InputError(
                f"--layer-ids {layer_ids} counted by {counting} are {ours} in Aerie's counting; "
                f"{error}"
            ) from None
        return cls(tuple(resolved), last_state == "after-norm", answers == "greedy")


@dataclass
class ImportResult:
    """Counts of the files, and why some were refused: `refused` by name, `reasons` counted."""

    samples: int = 0
    tokens: int = 0
    present: int = 0
    rounded: int = 0
    shards: list[ShardEntry] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)

    def refuse(self, name: str, error: RefusedFile) -> None:
        self.refused[name] = str(error)
        self.reasons[error.reason] += 1


def import_files(
    files: list[Path],
    names: list[str],
    store: Store,
    teacher: Teacher,
    stated: StatedLayout,
    masks: Callable[[str], Mask | None],
    written: Callable[[ImportResult], object],
    progress: Callable[[int, str], None],
) -> ImportResult:
    """Write other tools' files as shards of the store's convention.

    Extraction finds a sample by its tokens in any shard of the convention, so the next run with
    these samples copies them. Samples that the store holds already are skipped. `names`: the
    files' names in the report; `masks`: the loss mask of a sample key, for files without one;
    `written` is called after each shard, so that a manifest names it before the next one. A file
    that fails a check is counted and left where it is.
    """
    done = ImportResult()
    keys: dict[int, str] = {}
    for number, path in enumerate(files):
        try:
            keys[number] = sample_key(read_tokens(path, len(teacher.head)).tolist())
        except RefusedFile as error:
            done.refuse(names[number], error)
    found = store.find_samples(set(keys.values()))
    present = [(files[n], found[k]) for n, k in keys.items() if k in found]
    _compare(present[:8], stated)
    done.shards = [_entry(p) for p in _unnamed(store, {p for p, _ in found.values()})]
    taken: set[str] = set()
    waiting: list[Sample] = []
    first: dict[str, str] = {}

    def flush() -> None:
        if waiting:
            shard = shard_id(sample_key(s.tokens.tolist()) for s in waiting)
            done.shards.append(_entry(store.write(shard, waiting)))
            done.samples += len(waiting)
            done.tokens += sum(len(s.tokens) for s in waiting)
            waiting.clear()
            written(done)

    for number, path in enumerate(files):
        key = keys.get(number)
        if key in found:
            done.present += 1
        elif key in taken:
            done.refuse(names[number], RefusedFile("the same tokens as an earlier file"))
        elif key is not None:
            try:
                foreign = read_foreign(path)
                states = check_foreign(
                    foreign,
                    masks(key),
                    store.convention,
                    teacher,
                    stated.after_norm,
                    stated.greedy,
                )
                twin = first.setdefault(checksum(states), names[number])
                if twin != names[number]:
                    # One of them is wrong, but which one is unknown.
                    for other in [s for s in waiting if s.id == twin]:
                        waiting.remove(other)
                        done.refuse(twin, RefusedFile(TWINS, names[number]))
                    raise RefusedFile(TWINS, twin)
                done.rounded += foreign.states.dtype != torch.bfloat16
                waiting.append(Sample(names[number], foreign.tokens, states))
                taken.add(key)
            except RefusedFile as error:
                done.refuse(names[number], error)
        if sum(s.states.nbytes for s in waiting) >= SHARD_BYTES:
            flush()
        progress(number + 1, f"{len(done.refused)} refused")
    flush()
    return done


def _entry(path: Path) -> ShardEntry:
    """The manifest's entry for this shard."""
    with Shard(path) as shard:
        return ShardEntry(
            id=path.stem,
            file=path.name,
            samples=[s["id"] for s in shard.samples],
            tokens=sum(s["tokens"] for s in shard.samples),
            bytes=path.stat().st_size,
            checksum=file_checksum(path),
        )


def _unnamed(store: Store, paths: set[Path]) -> list[Path]:
    """Those that no manifest names because their import was killed first."""
    named = read_references(store.folder.parents[1], []).shards
    return sorted(
        p
        for p in paths
        if (store.convention.key, p.stem) not in named and not facts_path(p).exists()
    )


def _compare(present: list[tuple[Path, tuple[Path, int]]], stated: StatedLayout) -> None:
    """Raise `InputError` when states differ from those in the store for the same tokens.

    The teacher proves the last layer only; this comparison proves the others, where it is
    possible. Two engines differ by a few percent in bf16, neighbouring layers by far more.
    """
    for file, (path, number) in present:
        try:
            theirs = read_foreign(file).states.float()
        except RefusedFile:
            continue
        with Shard(path) as shard:
            ours = shard.read(number).states.float()
        layers = len(stated.layer_ids) - stated.after_norm
        if theirs.shape != ours.shape:
            continue
        theirs, ours = theirs[:, :layers], ours[:, :layers]
        error = (theirs - ours).norm(dim=(0, 2)) / ours.norm(dim=(0, 2))
        wrong = (error > 0.1).tolist()
        if any(wrong):
            # The last state is the same one however the layers are counted.
            fed = len(stated.layer_ids) - 1
            options = ["--layer-ids", "--counting"] * any(wrong[:fed])
            options += ["--last-state"] * any(wrong[fed:])
            found = ", ".join(
                f"{i}: {e:.0%}" for i, e in zip(stated.layer_ids, error.tolist(), strict=False)
            )
            raise InputError(
                f"{file}: the store has states of the same tokens, and these differ by layer "
                f"({found}); check {' and '.join(options)}"
            )


def write_import(
    root: Path, source: Path, store: Store, stated: StatedLayout, done: ImportResult
) -> Path:
    """Write the manifest of the shards imported from this folder, now and earlier, so that
    `store.py gc` keeps them."""
    c = store.convention
    name = digest(c.key, str(source.resolve()), stated.after_norm)[:16]
    path = root / IMPORTS / f"{name}.json"
    new = {s.id for s in done.shards}
    before = ImportManifest.read(path).shards if path.exists() else []
    shards = [s for s in before if s.id not in new and store.has(s.id)] + done.shards
    length = "its length lost" if stated.after_norm else "as it was"
    ImportManifest(
        convention=ManifestConvention.of(c, f"before the final norm, {length}"),
        source=str(source),
        shards=shards,
        samples=sum(len(s.samples) for s in shards),
        tokens=sum(s.tokens for s in shards),
        refused=done.refused,
    ).write(path)
    return path


def import_states(
    root: Path,
    run: Path,
    folder: Path,
    layer_ids: list[int],
    counting: str,
    last_state: str,
    answers: str,
    form: str,
) -> bool:
    """Import the files in `folder`, print what became of them; whether none was refused.

    `root`: the store; `run`: whose verifier it is; `form`: the format of the shards; the others
    as in `StatedLayout.of`.
    """
    verifier = read_fingerprint(run / FINGERPRINT)
    stated = StatedLayout.of(layer_ids, counting, verifier.num_layers, last_state, answers)
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder")
    files, others = find_files(folder)
    if not files:
        raise InputError(
            f"{folder}: holds no hs_*.safetensors, *.pt, *.ckpt or *.ckpt.gz "
            f"({len(others)} other files)"
        )
    convention = Convention(
        verifier.fingerprint,
        stated.layer_ids,
        verifier.hidden_size,
        form,
        tokenizer=verifier.tokenizer,
    )
    store = Store(root, convention)
    with JobProgress("import", len(files), "files") as bar:
        done = import_files(
            files,
            [str(path.relative_to(folder)) for path in files],
            store,
            Teacher(verifier.folder),
            stated,
            masks_of(run, folder),
            lambda done: write_import(root, folder, store, stated, done),
            bar.update,
        )
    print(
        f"{len(files)} files: {done.samples} samples with {done.tokens} tokens written to "
        f"{len(done.shards)} shards in {store.folder}, {done.present} were in the store already, "
        f"{len(done.refused)} refused"
        + (f"; {len(others)} files are of no known layout" if others else "")
    )
    if done.rounded:
        print(f"{done.rounded} were not in bf16 and were rounded to it")
    if stated.after_norm and done.samples:
        print("The last states are kept up to their length, which the final norm had removed.")
    for reason, count in done.reasons.most_common():
        examples = [f"{n}: {e}" for n, e in done.refused.items() if e.startswith(reason)]
        print(f"  {count} refused: {reason}")
        for example in examples[:3]:
            print(f"    {example}")
    if done.shards:
        path = write_import(root, folder, store, stated, done)
        print(f"Named in {path}; delete that file once a run has copied them.")
    return not done.refused
