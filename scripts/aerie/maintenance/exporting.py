"""Exporting a run's states in the layouts of speculators and SpecForge (see `foreign`)."""

import shlex
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from aerie.common.errors import InputError
from aerie.common.files import atomic_write, read_optional
from aerie.common.progress import JobProgress
from aerie.common.records import Record
from aerie.maintenance.final_norm import final_norm
from aerie.maintenance.references import References, read_run
from aerie.samples.file import TokenizedSample, read_samples
from aerie.samples.shards import ShardList
from aerie.states.manifest import LaneManifest, ManifestConvention
from aerie.states.shard import Sample, Shard
from aerie.states.teacher import Teacher
from aerie.verifier.fingerprint import FINGERPRINT, read_fingerprint

FILES_A_FOLDER = 5000
"""As SpecForge groups its files."""


class ExportInfo(Record):
    """`aerie.json` in an export's folder. `layer_ids`, `counting` and `last_state` are the options
    of `store.py import` for its files."""

    run: str
    """Name of the run."""
    to: str
    """`speculators` or `specforge`."""
    samples: int
    """In the export."""
    tokens: int
    """Of all samples."""
    layer_ids: list[int]
    """The layers that feed the drafter, as `to` counts them."""
    counting: str
    """`entering`: id k is the state entering layer k; `output`: it is that layer's output."""
    last_state: str
    """`before` or `after-norm`: whether the last state is after the final norm."""
    meaning: str
    """The same in a sentence."""
    verifier: str
    """Its fingerprint."""
    hidden_size: int
    """Width of a state."""
    convention: str
    """Key of the store's folder that the states are from."""


@dataclass
class TrainingData:
    """What a run trains on: `places` are samples with their shard and position in it, `train` of
    them to train on, then the held-out ones."""

    convention: ManifestConvention
    places: list[tuple[TokenizedSample, Path, int]]
    train: int

    @property
    def tokens(self) -> int:
        return sum(len(row.input_ids) for row, _, _ in self.places)

    def samples(self) -> Iterator[tuple[int, TokenizedSample, Sample]]:
        """All samples with their numbers, those to train on first."""
        shard: Shard | None = None
        for number, (row, path, position) in enumerate(self.places):
            if shard is None or shard.path != path:
                shard = Shard(path)
            sample = shard.read(position)
            if sample.tokens.tolist() != row.input_ids:
                raise InputError(
                    f"{path}: sample {row.id} holds other tokens than the run's samples.parquet; "
                    "start the run again"
                )
            yield number, row, sample


def read_source(run: Path, store: Path) -> TrainingData:
    """The samples of a finished extraction. Raises `InputError` for an unfinished one."""
    rows = read_samples(run / "samples/samples.parquet")
    references = References()
    read_run(run, references)
    for path, error in references.unreadable.items():
        raise InputError(f"{path}: {error}; delete it and start the run again")
    for reason in references.unfinished.values():
        raise InputError(f"{run}: {reason}; finish the run first")
    wanted = [shard.id for shard in ShardList.read(run / "samples/shards.json").shards]
    # A run that once had other layers or more lanes keeps manifests that nothing reads any more.
    first = LaneManifest.read(run / "hidden_states/lane-0.json").convention
    places: dict[str, list[tuple[TokenizedSample, Path, int]]] = {"train": [], "heldout": []}
    for identity in wanted:
        for reference in references.shards.get((first.key, identity), [])[:1]:
            path = store / "hidden_states" / first.key / reference.entry.file
            for position, sample in enumerate(reference.entry.samples):
                row = rows.get(sample)
                if row is None:
                    raise InputError(
                        f"{run}: the lanes' manifests name sample {sample}, samples.parquet does "
                        "not; finish the run first"
                    )
                places[row.split].append((row, path, position))
    return TrainingData(first, places["train"] + places["heldout"], len(places["train"]))


def prepare_folder(folder: Path, source: TrainingData) -> None:
    """Create the folder to export to. Raises `InputError` if it is not empty, or the disk full."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: a file; expected the name of a new folder")
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"{folder}: not empty; an export is written whole, into a new folder")
    c = source.convention
    needed = source.tokens * len(c.layer_ids) * c.hidden_size * 2
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise InputError(
            f"{folder}: the export takes {needed / 1e9:.1f} GB uncompressed, {free / 1e9:.1f} GB "
            "are free"
        )


def describe_export(run: Path, to: str, source: TrainingData) -> ExportInfo:
    """SpecForge's files hold the last state after the final norm, and it names a layer by its
    output."""
    c = source.convention
    if to == "specforge":
        layer_ids, counting, last_state = [k - 1 for k in c.aux_layer_ids], "output", "after-norm"
        meaning = (
            "id k is the output of layer k; that of the last one, which has no id here, is after "
            "the final norm"
        )
    else:
        layer_ids, counting, last_state = c.aux_layer_ids, "entering", "before"
        meaning = (
            "id k is the state entering layer k; the output of the last one, which has no id here, "
            "is before the final norm"
        ) + ", zero where no loss is taken" * (c.last_state == "supervised")
    return ExportInfo(
        run=run.name,
        to=to,
        samples=len(source.places),
        tokens=source.tokens,
        layer_ids=layer_ids,
        counting=counting,
        last_state=last_state,
        meaning=meaning,
        verifier=c.verifier,
        hidden_size=c.hidden_size,
        convention=c.key,
    )


def export_speculators(source: TrainingData, folder: Path, progress: Callable[[int], None]) -> None:
    """A data path of speculators: Arrow data set and `hidden_states/hs_<row>.safetensors`.

    The data set is written last, because a folder without it counts as incomplete.
    """
    from datasets import Dataset

    for number, _, sample in source.samples():
        with atomic_write(folder / "hidden_states" / f"hs_{number}.safetensors") as temporary:
            save_file(
                {"hidden_states": sample.states.contiguous(), "token_ids": sample.tokens},
                temporary,
            )
        progress(number + 1)
    rows = [row for row, _, _ in source.places]
    dataset = Dataset.from_dict(
        {
            "input_ids": [row.input_ids for row in rows],
            "loss_mask": [[int(m) for m in row.loss_mask] for row in rows],
            "seq_len": [len(row.input_ids) for row in rows],
        }
    )
    dataset.set_format(type="torch")
    dataset.save_to_disk(str(folder))


def export_specforge(
    source: TrainingData, folder: Path, teacher: Teacher, progress: Callable[[int], None]
) -> None:
    """SpecForge's offline files, `rows_<a>-<b>/data_<row>.ckpt` under `train` and `heldout`.

    The last state is written after the final norm, as SpecForge's target head takes it. Raises
    `InputError` where the store left out rows of the last layer: SpecForge uses other ones.
    """
    for number, row, sample in source.samples():
        last = sample.states[:, -1]
        if bool((last == 0).all(-1).any()):
            raise InputError(
                f"sample {row.id}: rows of the last layer were left out of the store "
                "(hidden_states.last_state); SpecForge needs them all, extract without that"
            )
        first = number if row.split == "train" else number - source.train
        group = first - first % FILES_A_FOLDER
        place = folder / row.split / f"rows_{group}-{group + FILES_A_FOLDER}"
        with atomic_write(place / f"data_{first}.ckpt") as temporary:
            torch.save(
                {
                    "input_ids": sample.tokens,
                    "loss_mask": torch.tensor(row.loss_mask, dtype=torch.int64),
                    "hidden_state": final_norm(last, teacher)[None],
                    "aux_hidden_state": sample.states[:, :-1].flatten(1)[None].contiguous(),
                },
                temporary,
            )
        progress(number + 1)


def export_states(store: Path, run: Path, to: str, folder: Path) -> None:
    """Export a run's states to `folder` for the trainer `to`; print how to use and import them."""
    source = read_source(run, store)
    prepare_folder(folder, source)
    number = len(source.places)
    with JobProgress("export", number, "samples") as bar:
        if to == "speculators":
            export_speculators(source, folder, bar.update)
        else:
            verifier = read_fingerprint(run / FINGERPRINT)
            export_specforge(source, folder, Teacher(verifier.folder), bar.update)
    about = describe_export(run, to, source)
    about.write(folder / "aerie.json")
    print(f"{number} samples, {source.tokens} tokens in {folder}")
    ids = " ".join(map(str, about.layer_ids))
    if to == "speculators":
        # Half a row more, so that truncation gives exactly the number of training samples.
        ratio = (source.train + 0.5) / number
        print(
            f"speculators train --data-path {folder} --on-missing raise --train-data-ratio "
            f"{ratio:.9f} --target-layer-ids {ids}"
        )
    else:
        print(f"layers by their output, as SpecForge counts: {ids}")
    if source.convention.last_state == "supervised":
        print("`store.py import` does not take them: last states without a loss are left out")
    else:
        command = _import_command(store, run, folder, about, source.convention.format)
        print(f"To take them into a store:\n  {command}")


def _import_command(store: Path, run: Path, folder: Path, about: ExportInfo, form: str) -> str:
    """The command that imports the files of an export into the store."""
    generation = read_optional(run / "config.json").get("generation", {})
    greedy = generation.get("mode") == "generate" and generation.get("temperature") == 0
    words: list[object] = [".venv/bin/python", "scripts/store.py"]
    words += ["--store", store] * (store != Path("results/store"))
    words += ["import", "--run", run, "--layer-ids", *about.layer_ids]
    words += ["--counting", about.counting, "--last-state", about.last_state]
    words += ["--answers", "greedy" if greedy else "other"]
    words += ["--format", form] * (form != "lossless")
    return shlex.join(map(str, [*words, folder]))
