"""scripts/store.py on a small store: what it finds wrong, what it may delete, what it exchanges."""

import gzip
import io
import json
import os
import pickle
import shlex
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import store as program
from aerie.common import cli
from aerie.common.files import write_json
from aerie.common.leases import Leases
from aerie.extraction.lane import (
    LaneWork,
    describe_lane,
    facts_path,
    write_nothing_kept,
    write_shard,
)
from aerie.maintenance import exchange
from aerie.samples.file import TokenizedSample, write_samples
from aerie.samples.shards import plan_shard
from aerie.states.manifest import broken_shards
from aerie.states.shard import Convention, Sample, Shard, Store, sample_key

LAYERS, WIDTH, VOCABULARY = 6, 16, 64
IDS = (1, 2, 4, LAYERS)


def bits(states: torch.Tensor) -> torch.Tensor:
    return states.contiguous().view(torch.uint16)


@pytest.fixture(scope="session")
def verifier(tmp_path_factory) -> SimpleNamespace:
    """What is needed of a checkpoint: config, head (tied), a final norm with uneven weights."""
    folder = tmp_path_factory.mktemp("store") / "verifier"
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "vocab_size": VOCABULARY,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    write_json(folder / "config.json", config)
    generator = torch.Generator().manual_seed(5)
    head = torch.nn.functional.normalize(torch.randn(VOCABULARY, WIDTH, generator=generator), dim=1)
    norm = (torch.rand(WIDTH, generator=generator) * 1.5 + 0.5).to(torch.bfloat16)
    head = head.to(torch.bfloat16)
    save_file(
        {"model.embed_tokens.weight": head, "model.norm.weight": norm},
        folder / "model.safetensors",
    )
    return SimpleNamespace(folder=folder, head=head.float(), norm=norm.float(), eps=1e-5)


def make_row(verifier, number: int, split: str = "train") -> tuple[TokenizedSample, torch.Tensor]:
    """A sample whose last states lead to its next tokens, as a greedy verifier's do."""
    generator = torch.Generator().manual_seed(100 + number)
    length = 14 + number
    tokens = torch.randint(0, VOCABULARY, (length + 1,), generator=generator)
    states = torch.randn(length, len(IDS), WIDTH, generator=generator) * 3
    lengths = torch.rand(length, 1, generator=generator) * 20 + 5
    states[:, -1] = verifier.head[tokens[1:]] / verifier.norm * lengths
    mask = [i >= 4 for i in range(length)]
    name = f"record-{number}"
    row = TokenizedSample(name, name, "test", split, tokens[:-1].tolist(), mask, 4, int(tokens[-1]))
    return row, states.to(torch.bfloat16)


class Place:
    """A workflow's folder with one finished run, `demo`: two shards to train on, one held out."""

    def __init__(self, folder: Path, verifier: SimpleNamespace, capsys, monkeypatch):
        self.folder, self.verifier = folder, verifier
        self._capsys, self._monkeypatch = capsys, monkeypatch
        self.root = folder / "results/store"
        self.convention = Convention("f" * 32, IDS, WIDTH, tokenizer="t" * 32)
        self.store = Store(self.root, self.convention)
        self.root.mkdir(parents=True)
        made = [make_row(verifier, n, "heldout" if n >= 6 else "train") for n in range(8)]
        self.rows = {row.id: row for row, _ in made}
        self.states = {row.id: states for row, states in made}
        self.groups = [made[:3], made[3:6], made[6:]]
        self.shards = self.write_run("demo", self.groups)

    def write_run(self, name: str, groups) -> list[dict]:
        run = self.folder / "results" / name
        shards = []
        for group in groups:
            shard = plan_shard(group[0][0].split, [row for row, _ in group]).as_json()
            samples = [Sample(r.id, torch.tensor(r.input_ids), s) for r, s in group]
            self.store.write(shard["id"], samples)
            shards.append(shard)
        write_json(
            run / "verifier/fingerprint.json",
            {
                "path": str(self.verifier.folder),
                "fingerprint": "f" * 32,
                "tokenizer": "t" * 32,
                "num_layers": LAYERS,
                "hidden_size": WIDTH,
                "vocab_size": VOCABULARY,
            },
        )
        (run / "prompts").mkdir(parents=True)
        write_json(run / "responses/manifest.json", {})
        write_json(run / "samples/shards.json", {"shards": shards})
        write_samples(run / "samples/samples.parquet", [row for g in groups for row, _ in g])
        counts = {"quarantined": {}}
        for lane, part in enumerate((shards[::2], shards[1::2])):
            work = LaneWork(self.store, {row.id: row for g in groups for row, _ in g}, part)
            manifest = describe_lane(work, counts, 0.0)
            write_json(run / f"hidden_states/lane-{lane}.json", manifest)
        return shards

    def path(self, number: int) -> Path:
        return self.store.path(self.shards[number]["id"])

    def lane(self, number: int) -> Path:
        return self.folder / f"results/demo/hidden_states/lane-{number}.json"

    def files(self) -> dict[str, bytes]:
        found = (p for p in (self.folder / "results").rglob("*") if p.is_file())
        return {str(p): p.read_bytes() for p in found}

    def call(self, *arguments: object) -> tuple[int, str]:
        """Exit status and what was printed."""
        self._monkeypatch.chdir(self.folder)
        self._monkeypatch.setattr(sys, "argv", ["store.py", *map(str, arguments)])
        self._capsys.readouterr()
        status = 0
        try:
            cli.run(program.main)
        except SystemExit as stop:
            status = stop.code or 0
        printed = self._capsys.readouterr()
        return status, printed.out + printed.err


@pytest.fixture
def place(tmp_path, verifier, capsys, monkeypatch) -> Place:
    return Place(tmp_path, verifier, capsys, monkeypatch)


# verify


def test_a_whole_store_is_found_whole(place):
    status, text = place.call("verify")
    tokens = sum(len(r.input_ids) for r in place.rows.values())
    assert (status, f"3 shards with {tokens} tokens read, 0 wrong" in text) == (0, True), text


def spoil(path: Path, kind: str) -> None:
    whole = path.read_bytes()
    if kind == "truncated":
        path.write_bytes(whole[: len(whole) // 2])
    elif kind == "flipped":
        path.write_bytes(whole[:-40] + bytes([whole[-40] ^ 4]) + whole[-39:])
    elif kind == "foreign":
        path.write_bytes(b"PK\x03\x04" + whole)
    elif kind == "of another tool":
        save_file({"hidden_states": torch.ones(3, 2)}, path)
    elif kind == "empty":
        path.write_bytes(b"")


@pytest.mark.parametrize("kind", ["truncated", "flipped", "foreign", "of another tool", "empty"])
def test_a_damaged_shard_is_named_and_set_aside(place, kind):
    spoil(place.path(1), kind)
    before = place.files()
    status, text = place.call("verify")
    assert status == 1
    assert str(place.path(1).relative_to(place.folder)) in text
    assert "1 wrong" in text
    assert place.files() == before  # without --set-aside nothing is touched
    status, _ = place.call("verify", "--set-aside")
    assert status == 1
    assert not place.path(1).exists()
    assert (place.store.folder / "damaged" / place.path(1).name).is_file()
    # The lane that made it runs again, and only that one; until then its loss can be seen.
    assert broken_shards(place.lane(1), place.root) == [place.path(1).name]
    assert broken_shards(place.lane(0), place.root) == []
    assert LaneWork(place.store, place.rows, place.shards).missing == [place.shards[1]]
    status, text = place.call("verify")
    assert status == 1
    assert "missing, though a manifest names it" in text


def test_a_shard_under_another_ones_name_is_foreign(place):
    shutil.copy(place.path(0), place.path(1))
    status, text = place.call("verify", place.shards[1]["id"][:10])
    assert status == 1
    assert "its samples are not those of its name" in text


def test_a_shard_of_another_convention_is_foreign(place):
    other = Store(place.root, Convention("f" * 32, (0, 2, 4, LAYERS), WIDTH))
    group = place.groups[1]
    samples = [Sample(r.id, torch.tensor(r.input_ids), s) for r, s in group]
    shutil.copy(other.write(place.shards[1]["id"], samples), place.path(1))
    status, text = place.call("verify")
    assert status == 1
    assert f"belongs to convention {other.convention.key}" in text


def test_states_that_a_broken_writer_let_pass_are_found(place, monkeypatch):
    row, states = place.groups[1][0]
    states = states.clone()
    states[3, 1, 2] = float("nan")
    monkeypatch.setattr("aerie.states.shard.check_states", lambda *_: None)
    samples = [Sample(r.id, torch.tensor(r.input_ids), s) for r, s in place.groups[1][1:]]
    samples.insert(0, Sample(row.id, torch.tensor(row.input_ids), states))
    place.store.write(place.shards[1]["id"], samples)
    status, text = place.call("verify")
    assert status == 1
    assert "NaN or infinity" in text


def test_a_missing_shard_is_found_by_the_manifest(place):
    place.path(2).unlink()
    status, text = place.call("verify", "--set-aside")
    assert status == 1
    assert "missing" in text
    assert broken_shards(place.lane(0), place.root) == [place.path(2).name]


def test_a_shard_made_anew_with_other_bytes_is_kept_and_its_manifest_goes(place):
    manifest = json.loads(place.lane(1).read_text())
    manifest["shards"][0]["checksum"] = "0" * 16
    write_json(place.lane(1), manifest)
    status, text = place.call("verify", "--set-aside")
    assert status == 1
    assert "size or checksum" in text
    assert place.path(1).is_file()
    assert not place.lane(1).exists()


def test_a_shard_of_which_nothing_was_kept_is_remembered_as_long_as_a_run_wants_it(place):
    path, rows = place.path(1), [row for row, _ in place.groups[1]]
    path.unlink()
    write_nothing_kept(path, {sample_key(row.input_ids): "too long" for row in rows})
    work = LaneWork(place.store, place.rows, place.shards[1::2])
    assert work.missing == []
    write_json(place.lane(1), describe_lane(work, {}, 0.0))
    for command in ("verify", "list", "gc"):
        status, text = place.call(command)
        assert status == 0, text
        assert path.stem not in text
    assert "0 files" in text
    facts = facts_path(path)
    # Also while it cannot be told what is wanted.
    place.lane(0).rename(place.lane(0).with_suffix(".away"))
    place.call("gc", "--delete")
    assert facts.is_file()
    place.lane(0).with_suffix(".away").rename(place.lane(0))
    place.call("gc", "--delete")
    assert facts.is_file()
    export(place, "speculators")
    assert "5 samples" in place.text
    shutil.rmtree(place.folder / "results/demo")
    place.call("gc", "--delete")
    assert not facts.is_file()


def test_a_shard_without_a_quarantined_sample_is_right(place):
    first, *others = place.groups[1]
    samples = [Sample(r.id, torch.tensor(r.input_ids), s) for r, s in others]
    left_out = {sample_key(first[0].input_ids): "too long"}
    write_shard(place.store, place.shards[1]["id"], samples, left_out)
    counts = {"quarantined": {first[0].id: "too long"}}
    work = LaneWork(place.store, place.rows, [place.shards[1]])
    write_json(place.lane(1), describe_lane(work, counts, 0.0))
    status, text = place.call("verify")
    assert (status, "3 shards with" in text) == (0, True), text
    # Also where the run that wanted it is not known.
    status, text = place.call("--results", place.folder, "verify")
    assert (status, "3 shards with" in text) == (0, True), text
    # Under another's name it is foreign all the same.
    write_shard(place.store, place.shards[0]["id"], samples, left_out)
    place.path(0).replace(place.path(1))
    status, text = place.call("verify", place.shards[1]["id"])
    assert "its samples are not those of its name" in text


def test_fp8_states_that_were_rounded_to_zero_are_no_damage(place):
    row, states = place.groups[1][0]
    states = states.clone()
    states[0, 0] *= 0.001
    states[0, -1] *= 50_000
    store = Store(place.root, Convention("f" * 32, IDS, WIDTH, "fp8"))
    sample = Sample(row.id, torch.tensor(row.input_ids), states)
    store.write(plan_shard("train", [row]).id, [sample])
    status, text = place.call("verify")
    assert (status, "4 shards with" in text) == (0, True), text


def test_a_shard_of_another_version_is_said_to_be_one_and_left_alone(place, monkeypatch):
    monkeypatch.setattr("aerie.states.shard.SHARD_VERSION", 1)
    row, states = make_row(place.verifier, 50)
    store = Store(place.root, place.convention)
    shard = plan_shard("train", [row]).id
    path = store.write(shard, [Sample(row.id, torch.tensor(row.input_ids), states)])
    monkeypatch.setattr("aerie.states.shard.SHARD_VERSION", 2)
    for command in (("verify", "--set-aside"), ("list",), ("show", shard)):
        text = place.call(*command)[1]
        assert "format version 1, and this Aerie reads version 2 only" in text, text
        assert "store.py gc" in text
        assert "moves" not in text
    assert path.is_file()
    assert place.call("gc", "--delete")[0] == 0
    assert not path.exists()


@pytest.mark.parametrize("kind", ["folder", "link to nothing", "link to itself"])
def test_what_bears_a_shards_name_and_is_none_stops_no_command(place, kind):
    path = place.path(1)
    path.unlink()
    if kind == "folder":
        path.mkdir()
        (path / "file").write_text("x")
    else:
        path.symlink_to("nothing" if kind == "link to nothing" else path.name)
    for command in ("list", "gc", "verify"):
        status, text = place.call(command)
        assert status == (command == "verify"), text
        assert command == "gc" or "not a whole shard" in text
    assert place.call("show", place.shards[1]["id"])[0] == 77
    assert "repair: move the file aside" in text
    place.call("verify", "--set-aside")
    assert not os.path.lexists(path)
    assert os.path.lexists(place.store.folder / "damaged" / path.name)
    assert "missing, though a manifest names it" in place.call("verify")[1]
    assert place.call("gc", "--delete")[0] == 0
    assert not os.path.lexists(place.store.folder / "damaged" / path.name)


def test_a_shard_that_may_not_be_read_is_not_taken_for_damaged(place, monkeypatch):
    real, path = Path.open, place.path(1)

    def refuse(self, *arguments, **more):
        if self == path.relative_to(place.folder):
            raise PermissionError(13, "Permission denied", str(self))
        return real(self, *arguments, **more)

    monkeypatch.setattr(Path, "open", refuse)
    status, text = place.call("verify", "--set-aside")
    assert status == 1
    assert "Permission denied" in text
    assert path.is_file()
    assert place.lane(1).is_file()


@pytest.mark.parametrize("what", ["an empty store", "an empty folder of a convention"])
def test_an_empty_store_is_no_error(place, what):
    shutil.rmtree(place.folder / "results")
    (place.root / ("." if what == "an empty store" else "hidden_states/0123")).mkdir(parents=True)
    for command in (["verify"], ["verify", "--sample", "0.5"], ["list"], ["gc", "--delete"]):
        assert place.call(*command)[0] == 0
    assert place.call("--store", "nowhere", "list")[0] == 1


def test_a_sample_of_the_shards_can_be_verified(place):
    assert "1 shards with" in place.call("verify", "--sample", "1")[1]
    assert "2 shards with" in place.call("verify", "--sample", "0.7")[1]
    for size in ("-1", "0", "1.5", "nan", "inf", "few"):
        status, text = place.call("verify", "--sample", size)
        assert status == 2
        assert "expected a number of shards" in text


def test_a_damaged_manifest_is_named(place):
    place.lane(0).write_text("{")
    status, text = place.call("verify")
    assert status == 1
    assert "lane-0.json" in text


# list and show


def test_list_counts_and_says_who_names_what(place):
    place.write_run("other", [place.groups[2]])
    status, text = place.call("list", "--json")
    found = json.loads(text)[place.convention.key]
    assert status == 0
    by_id = {s["id"]: s for s in found}
    assert by_id[place.shards[2]["id"]]["runs"] == ["demo", "other"]
    shard = by_id[place.shards[0]["id"]]
    tokens = sum(len(r.input_ids) for r, _ in place.groups[0])
    assert (shard["samples"], shard["tokens"], shard["runs"]) == (3, tokens, ["demo"])
    assert shard["bytes"] == place.path(0).stat().st_size
    assert shard["raw_bytes"] == tokens * 4 * WIDTH * 2
    assert shard["ratio"] == pytest.approx(shard["bytes"] / shard["raw_bytes"])
    spoil(place.path(0), "empty")
    status, text = place.call("list")
    assert "demo, other" in text
    assert "not a whole shard" in text


def test_show_gives_each_samples_norms(place):
    status, text = place.call("show", place.shards[0]["id"][:12], "--json")
    found = json.loads(text)
    assert status == 0
    row, states = place.groups[0][1]
    sample = found["samples"][1]
    assert (sample["id"], sample["tokens"]) == (row.id, len(row.input_ids))
    expected = np.linalg.norm(states.float().numpy(), axis=-1).mean(0)
    assert list(sample["mean_norm"].values()) == pytest.approx(expected.tolist(), abs=1e-3)
    assert place.call("show", place.path(0))[0] == 0
    status, text = place.call("show", "nothing")
    assert status == 1
    assert "expected the id of one shard" in text


# gc


@pytest.fixture
def unnamed(place) -> Path:
    """A shard that no manifest names."""
    row, states = make_row(place.verifier, 50)
    shard = plan_shard("train", [row]).id
    write_shard(place.store, shard, [Sample(row.id, torch.tensor(row.input_ids), states)], {})
    return place.store.path(shard)


def test_gc_says_what_it_would_do_and_does_nothing(place, unnamed):
    before = place.files()
    status, text = place.call("gc")
    assert status == 0
    assert str(unnamed.relative_to(place.folder)) in text
    size = unnamed.stat().st_size + facts_path(unnamed).stat().st_size
    assert f"2 files, {size} bytes" in text
    assert place.files() == before


def test_gc_deletes_what_no_run_names_and_nothing_else(place, unnamed):
    place.write_run("other", [place.groups[2], [make_row(place.verifier, 9)]])
    shutil.rmtree(place.folder / "results/demo")
    before = set(place.files())
    status, _ = place.call("gc", "--delete")
    shards = [unnamed, place.path(0), place.path(1)]
    assert status == 0
    assert before - set(place.files()) == {str(p) for s in shards for p in (s, facts_path(s))}


@pytest.mark.parametrize("what", ["no samples", "an unextracted shard", "no responses", "damaged"])
def test_gc_touches_no_shard_while_a_run_is_unfinished(place, unnamed, what):
    other = place.folder / "results/other"
    place.write_run("other", [[make_row(place.verifier, 9)]])
    if what == "no samples":
        (other / "samples/shards.json").unlink()
    elif what == "an unextracted shard":
        (other / "hidden_states/lane-0.json").unlink()
    elif what == "no responses":
        (other / "responses/manifest.json").unlink()
    else:
        (other / "hidden_states/lane-0.json").write_text("[]")
    before = place.files()
    status, text = place.call("gc", "--delete")
    assert status == 0
    assert "other" in text
    assert "no shard is collected" in text
    assert place.files() == before


def test_gc_does_not_delete_while_snakemake_works(place, unnamed):
    (place.folder / ".snakemake/locks").mkdir(parents=True)
    (place.folder / ".snakemake/locks/0.input.lock").write_text("")
    status, text = place.call("gc", "--delete")
    assert status == 1
    assert "Snakemake" in text
    assert unnamed.is_file()


def test_gc_does_not_delete_beside_a_run_of_another_checkout(place, unnamed):
    with Leases() as other:
        assert other.take(place.folder / "results/demo/run")
        status, text = place.call("gc", "--delete")
    assert status == 1
    assert "results/demo: a run is at work (process" in text
    assert unnamed.is_file()


def test_gc_of_a_store_elsewhere_asks_whose_it_is(place):
    """Runs of two checkouts use it; each names shards that the other does not."""
    shared = place.folder / "shared"
    (place.folder / "results/store").rename(shared)
    before = set(shared.rglob("*.safetensors"))
    status, text = place.call("--store", shared, "gc", "--delete")
    assert status == 1
    assert "--results" in text
    (place.folder / "other/results").mkdir(parents=True)
    (place.folder / "results/demo").rename(place.folder / "other/results/demo")
    (place.folder / "results/mine").mkdir()
    both = ("--results", "results", "--results", "other/results")
    status, text = place.call("--store", shared, *both, "gc", "--delete")
    assert status == 0, text
    assert set(shared.rglob("*.safetensors")) == before
    status, text = place.call("--store", shared, "--results", "results", "gc")
    assert f"{2 * len(before)} files" in text  # what would have been lost


@pytest.mark.parametrize("results", ["result", "results/demo", "results/demo/samples.json"])
def test_gc_believes_no_folder_that_holds_no_runs(place, results):
    """With a mistyped name no run would name any shard."""
    before = place.files()
    status, text = place.call("--results", results, "gc", "--delete")
    assert status == 1
    assert f"{results}: " in text
    assert place.files() == before


def test_gc_says_what_it_could_not_delete(place, unnamed, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied", "x")

    with monkeypatch.context() as held:
        held.setattr(Path, "unlink", refuse)
        status, text = place.call("gc", "--delete")
    assert status == 1
    assert "not deleted: Permission denied" in text
    assert "0 files, 0 bytes (0 B) deleted; 2 could not be" in text
    assert unnamed.is_file()


def test_gc_collects_damaged_and_forsaken_files(place):
    spoil(place.path(1), "empty")
    place.call("verify", "--set-aside")
    ended = 2**22 + 1  # above the largest process id
    names = {
        "ended": f".x.{ended}.abc.tmp",
        "working": f".x.{os.getpid()}.abc.tmp",
        "just left": f".y.{ended}.abc.tmp",
        "old": ".z.1.abc.tmp",
    }
    for kind, name in names.items():
        path = place.store.folder / name
        path.write_bytes(b"part")
        age = {"just left": 0, "old": 90000}.get(kind, 7200)
        os.utime(path, (path.stat().st_mtime - age,) * 2)
    before = set(place.files())
    status, _ = place.call("gc", "--delete")
    gone = {Path(p).name for p in before - set(place.files())}
    assert status == 0
    shard = place.path(1)
    assert gone == {names["ended"], names["old"], shard.name, facts_path(shard).name}
    assert not (place.store.folder / "damaged" / place.path(1).name).exists()


# export


def export(place, to: str) -> Path:
    target = place.folder / f"for-{to}"
    status, text = place.call("export", "--to", to, "--run", "results/demo", target)
    assert status == 0, text
    place.text = text
    return target


def test_speculators_own_reader_takes_the_export(place):
    from speculators.data_generation.offline import check_hidden_states
    from speculators.train.data import ArrowDataset

    target = export(place, "speculators")
    ratio = float(place.text.split("--train-data-ratio ")[1].split()[0])
    seen = []
    for split in ("train", "val"):
        data = ArrowDataset(64, target, on_missing="raise", train_ratio=ratio, split=split)
        for number in range(len(data)):
            item = data[number]
            row = next(r for r in place.rows.values() if r.input_ids == item["input_ids"].tolist())
            states = place.states[row.id]
            assert row.split == ("train" if split == "train" else "heldout")
            assert torch.equal(bits(item["hidden_states"]), bits(states[:, :-1].flatten(1)))
            assert torch.equal(bits(item["verifier_last_hidden_states"]), bits(states[:, -1]))
            assert item["loss_mask"].tolist() == [int(m) for m in row.loss_mask]
            seen.append(row.id)
        assert data.approx_lengths == [len(data[n]["input_ids"]) for n in range(len(data))]
    assert sorted(seen) == sorted(place.rows)
    first = load_file(target / "hidden_states/hs_0.safetensors")
    check_hidden_states(first, place.rows["record-0"].input_ids)
    assert "--target-layer-ids 1 2 4\n" in place.text


def test_specforge_files_are_after_the_final_norm(place):
    target = export(place, "specforge")
    paths = sorted(target.rglob("*.ckpt"))
    assert [str(p.relative_to(target)) for p in paths] == [
        *(f"heldout/rows_0-5000/data_{n}.ckpt" for n in range(2)),
        *(f"train/rows_0-5000/data_{n}.ckpt" for n in range(6)),
    ]
    for number, path in enumerate(paths):
        row = place.rows[f"record-{(number + 6) % 8}"]
        states = place.states[row.id]
        data = torch.load(path, weights_only=True, mmap=True)
        length = len(row.input_ids)
        assert data["input_ids"].tolist() == row.input_ids
        assert data["loss_mask"].tolist() == [int(m) for m in row.loss_mask]
        assert data["input_ids"].dtype == data["loss_mask"].dtype == torch.int64
        assert data["aux_hidden_state"].shape == (1, length, 3 * WIDTH)
        assert torch.equal(bits(data["aux_hidden_state"][0]), bits(states[:, :-1].flatten(1)))
        # SpecForge's target head is the head alone: no norm any more.
        assert data["hidden_state"].shape == (1, length, WIDTH)
        logits = data["hidden_state"][0].float() @ place.verifier.head.T
        assert logits.argmax(-1).tolist() == [*row.input_ids[1:], row.next_token]
        x = states[:, -1].double()
        rms = (x.pow(2).mean(-1, keepdim=True) + place.verifier.eps).sqrt()
        expected = x / rms * place.verifier.norm
        assert torch.allclose(data["hidden_state"][0].double(), expected, rtol=2**-8, atol=1e-6)
    assert "as SpecForge counts: 0 1 3\n" in place.text


@pytest.mark.parametrize("answers", ["greedy", "other"])
@pytest.mark.parametrize("to", ["speculators", "specforge"])
def test_an_export_ends_with_the_command_that_takes_it_in(place, to, answers):
    generation = {"mode": "generate", "temperature": 0.0 if answers == "greedy" else 0.7}
    write_json(place.folder / "results/demo/config.json", {"generation": generation})
    target = export(place, to)
    about = json.loads((target / "aerie.json").read_text())
    assert about["layer_ids"] == ([0, 1, 3] if to == "specforge" else [1, 2, 4])
    assert about["counting"] == ("output" if to == "specforge" else "entering")
    assert about["last_state"] == ("after-norm" if to == "specforge" else "before")
    assert f"{'after' if to == 'specforge' else 'before'} the final norm" in about["meaning"]
    store = empty_store(place)
    printed = place.text.split("To take them into a store:\n")[1].splitlines()[0]
    program, script, *command = shlex.split(printed)
    assert (program, script) == (".venv/bin/python", "scripts/store.py")
    assert command[command.index("--answers") + 1] == answers
    status, text = place.call(*command)
    assert status == 0, text
    assert "8 samples" in text
    assert "no known layout" not in text  # its own files beside the samples
    assert LaneWork(store, place.rows, place.shards).to_extract() == []


def test_files_of_no_known_layout_are_counted(place):
    target = export(place, "speculators")
    (target / "notes.txt").touch()
    assert "1 files are of no known layout" in take_in(place, target, SPECULATORS)[1]


def test_an_export_without_all_last_states_says_that_import_does_not_take_it(place):
    for number in range(2):
        lane = json.loads(place.lane(number).read_text())
        lane["convention"]["last_state"] = "supervised"
        write_json(place.lane(number), lane)
    target = export(place, "speculators")
    assert "`store.py import` does not take them" in place.text
    assert "zero where" in json.loads((target / "aerie.json").read_text())["meaning"]


def test_an_export_goes_into_a_new_folder_only(place):
    target = export(place, "speculators")
    status, text = place.call("export", "--to", "specforge", "--run", "results/demo", target)
    assert status == 1
    assert "not empty" in text


def test_an_export_that_the_disk_cannot_hold_is_not_begun(place, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    status, text = place.call("export", "--to", "speculators", "--run", "results/demo", "new")
    assert status == 1
    assert "are free" in text


def test_an_export_takes_no_file_for_a_folder(place):
    status, text = place.call("export", "--to", "specforge", "--run", "results/demo", place.lane(0))
    assert status == 1
    assert "expected the name of a new folder" in text


def test_lanes_of_an_earlier_number_of_them_are_not_exported_again(place):
    """`hidden_states.lanes` was 2 and is 1: lane-1.json is left, and names what lane 0 has too."""
    work = LaneWork(place.store, place.rows, place.shards)
    write_json(place.lane(0), describe_lane(work, {"quarantined": {}}, 0.0))
    target = export(place, "speculators")
    assert "8 samples" in place.text
    assert len(list(target.glob("hidden_states/*"))) == 8


@pytest.mark.parametrize("what", ["missing", "damaged"])
def test_an_unfinished_extraction_is_not_exported(place, what):
    if what == "missing":
        place.lane(1).unlink()
    else:
        place.lane(1).write_text("[]")
    status, text = place.call("export", "--to", "speculators", "--run", "results/demo", "new")
    assert status == 1
    expected = {
        "missing": "1 shards are not extracted yet; finish the run first",
        "damaged": "lane-1.json: holds no manifest of shards; delete it",
    }
    assert expected[what] in text
    assert not (place.folder / "new").exists()


# import

SPECULATORS = ["--layer-ids", 1, 2, 4, "--counting", "entering", "--last-state", "before"]
SPECFORGE = ["--layer-ids", 0, 1, 3, "--counting", "output", "--last-state", "after-norm"]


def empty_store(place) -> Store:
    shutil.rmtree(place.store.folder)
    return place.store


def take_in(place, folder: Path, stated, answers="greedy"):
    return place.call("import", "--run", "results/demo", *stated, "--answers", answers, folder)


def test_what_speculators_has_comes_back_bit_for_bit(place):
    target = export(place, "speculators")
    store = empty_store(place)
    status, text = take_in(place, target, SPECULATORS)
    assert status == 0, text
    assert "8 samples" in text
    # The next run extracts nothing: it finds all samples by their tokens.
    work = LaneWork(store, place.rows, place.shards)
    assert work.to_extract() == []
    for row in place.rows.values():
        path, number = work.found[sample_key(row.input_ids)]
        with Shard(path) as shard:
            assert shard.convention == place.convention
            sample = shard.read(number)
        assert torch.equal(bits(sample.states), bits(place.states[row.id]))
    assert not any(store.has(s["id"]) for s in place.shards)  # so the import names them
    assert place.call("verify")[0] == 1  # the run's own shards are gone
    shutil.rmtree(place.folder / "results/demo/hidden_states")
    shutil.rmtree(place.folder / "results/demo")
    place.call("gc", "--delete")
    assert len(list(store.folder.glob("*.safetensors"))) == 1
    # A second import finds them all there.
    place.write_run("demo", place.groups)
    assert "8 were in the store already" in take_in(place, target, SPECULATORS)[1]


def test_specforges_states_come_back_but_for_the_length_of_the_last(place):
    target = export(place, "specforge")
    store = empty_store(place)
    status, text = take_in(place, target, SPECFORGE)
    assert status == 0, text
    assert "up to their length" in text
    for row in place.rows.values():
        path, number = store.find_samples({sample_key(row.input_ids)})[sample_key(row.input_ids)]
        with Shard(path) as shard:
            states = shard.read(number).states
        ours = place.states[row.id]
        assert torch.equal(bits(states[:, :-1]), bits(ours[:, :-1]))
        # The norm of both is the same, so are the logits.
        norm = torch.nn.RMSNorm(WIDTH, eps=place.verifier.eps)
        norm.weight.data = place.verifier.norm
        a, b = norm(states[:, -1].float()), norm(ours[:, -1].float())
        assert torch.allclose(a, b, rtol=2**-6, atol=1e-3)


def write_pt(path: Path, row: TokenizedSample, states: torch.Tensor, **changes) -> None:
    data = {
        "input_ids": torch.tensor(row.input_ids),
        "loss_mask": torch.tensor(row.loss_mask).long(),
        "hidden_states": [states[:, k].clone() for k in range(states.shape[1])],
    }
    torch.save({**data, **changes}, path)


def test_older_pt_files_are_taken_in(place):
    folder = place.folder / "old"
    folder.mkdir()
    for number, row in enumerate(place.rows.values()):
        write_pt(folder / f"data_{number}.pt", row, place.states[row.id])
    store = empty_store(place)
    status, text = take_in(place, folder, SPECULATORS)
    assert status == 0, text
    assert LaneWork(store, place.rows, place.shards).to_extract() == []


class Hostile:
    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return (os.system, (f"touch {self.marker}",))


def test_no_code_of_a_pickle_runs(place):
    folder = place.folder / "hostile"
    folder.mkdir()
    marker = place.folder / "marker"
    row, states = place.groups[0][0]
    write_pt(folder / "a.pt", row, states, extra=Hostile(marker))
    (folder / "b.pt").write_bytes(pickle.dumps(Hostile(marker)))
    buffer = io.BytesIO()
    torch.save(Hostile(marker), buffer)
    (folder / "c.ckpt.gz").write_bytes(gzip.compress(buffer.getvalue()))
    empty_store(place)
    status, text = take_in(place, folder, SPECULATORS)
    assert status == 1
    assert "3 refused" in text
    assert "0 samples" in text
    assert not marker.exists()


def test_wrong_files_are_counted_with_their_reasons_and_the_others_taken(place):
    folder = place.folder / "mixed"
    folder.mkdir()
    rows = list(place.rows.values())
    states = [place.states[r.id] for r in rows]

    def write_hs(number, row, states, **changes):
        data = {"hidden_states": states.contiguous(), "token_ids": torch.tensor(row.input_ids)}
        save_file({**data, **changes}, folder / f"hs_{number}.safetensors")

    write_hs(0, rows[0], states[0])
    write_hs(1, rows[0], states[0])  # again
    write_hs(2, rows[1], states[1][:-1])  # short
    nan = states[2].clone()
    nan[3, 1, 2] = float("nan")
    write_hs(3, rows[2], nan)
    write_hs(4, rows[3], torch.zeros_like(states[3]))
    swapped = states[4].roll(3, 0)
    write_hs(5, rows[4], swapped)  # the states of other tokens
    write_hs(6, rows[5], states[5], token_ids=torch.tensor(rows[5].input_ids) + VOCABULARY)
    whole = (folder / "hs_0.safetensors").read_bytes()
    (folder / "hs_7.safetensors").write_bytes(whole[:-30])
    (folder / "hs_8.safetensors").write_bytes(b"")
    write_pt(folder / "x.pt", rows[6], states[6], hidden_states=states[6][:1].expand(9**9, -1, -1))
    (folder / "notes.txt").write_text("not ours")
    store = empty_store(place)
    status, text = take_in(place, folder, SPECULATORS)
    assert status == 1
    assert "10 files: 1 samples" in text
    assert "9 refused; 1 files are of no known layout" in text
    for reason in (
        "the same tokens as an earlier file",
        "other shapes",
        "NaN or infinity",
        "states cannot be those of the tokens",
        "does not lead to the next tokens",
        "outside the verifier's vocabulary",
        "not readable",
        "larger than what the file holds",
    ):
        assert reason in text
    (manifest,) = (place.root / "imports").glob("*.json")
    refused = json.loads(manifest.read_text())["refused"]
    assert len(refused) == 9
    assert store.find_samples({sample_key(rows[0].input_ids)})
    assert len(list(folder.iterdir())) == 11  # the user's files stay where they are


def test_states_that_two_files_share_are_refused_in_both(place):
    target = export(place, "speculators")
    first, second = (target / f"hidden_states/hs_{n}.safetensors" for n in range(2))
    data = load_file(second)
    length = len(data["token_ids"]) - 1  # that of the first
    states = load_file(first)["hidden_states"]
    save_file({"hidden_states": states, "token_ids": data["token_ids"][:length]}, second)
    store = empty_store(place)
    status, text = take_in(place, target, SPECULATORS, answers="other")
    assert status == 1
    assert "6 samples" in text
    assert "2 refused: the same states as another file's of other tokens" in text
    assert len(list(store.folder.glob("*.safetensors"))) == 1


@pytest.mark.parametrize("kill", ["before the manifest", "after it"])
def test_shards_of_an_import_that_was_killed_are_named_by_the_next(place, monkeypatch, kill):
    target = export(place, "speculators")
    store = empty_store(place)
    shutil.rmtree(place.folder / "results/demo/hidden_states")
    monkeypatch.setattr("aerie.maintenance.exchange.SHARD_BYTES", 1000)  # one a sample
    real, count = exchange.write_import, []

    def killed(*arguments):
        count.append(1)
        if kill == "after it":
            real(*arguments)
        if len(count) == 3:
            raise KeyboardInterrupt
        if kill != "after it":
            real(*arguments)

    with monkeypatch.context() as dying:
        dying.setattr("aerie.maintenance.exchange.write_import", killed)
        assert take_in(place, target, SPECULATORS)[0] == 130
    assert len(list(store.folder.glob("*.safetensors"))) == 3
    status, text = take_in(place, target, SPECULATORS)
    assert (status, "3 were in the store already" in text) == (0, True), text
    (manifest,) = (place.root / "imports").glob("*.json")
    named = json.loads(manifest.read_text())
    assert {e["file"] for e in named["shards"]} == {p.name for p in store.folder.glob("*.saf*")}
    assert (named["samples"], len(named["shards"])) == (8, 8)
    # Another import from the same folder forgets none of them.
    shutil.rmtree(target / "hidden_states")
    row, states = make_row(place.verifier, 30)
    (target / "hidden_states").mkdir()
    save_file(
        {"hidden_states": states, "token_ids": torch.tensor(row.input_ids)},
        target / "hidden_states/hs_0.safetensors",
    )
    take_in(place, target, SPECULATORS, answers="other")
    assert json.loads(manifest.read_text())["samples"] == 9
    assert place.call("verify")[0] == 0


@pytest.mark.parametrize("kind", ["another", "damaged"])
def test_a_data_set_without_masks_is_said_to_be_one(place, kind):
    target = export(place, "speculators")
    if kind == "another":
        from datasets import Dataset

        shutil.rmtree(target)
        Dataset.from_dict({"text": ["a"]}).save_to_disk(str(target))
        write_pt(target / "a.pt", *place.groups[0][0])
    else:
        next(target.glob("*.arrow")).write_bytes(b"x")
    status, text = take_in(place, target, SPECULATORS)
    assert status == 1
    assert "expected a data set with the columns input_ids and loss_mask" in text


def test_a_mask_of_another_length_is_refused(place):
    from datasets import Dataset

    target = export(place, "speculators")
    empty_store(place)
    (place.folder / "results/demo/samples/samples.parquet").unlink()
    rows = [dict(input_ids=r.input_ids, loss_mask=[1] * 40) for r in place.rows.values()]
    states = target.rename(place.folder / "states")
    Dataset.from_list(rows).save_to_disk(str(target))
    (states / "hidden_states").rename(target / "hidden_states")
    status, text = take_in(place, target, SPECULATORS)
    assert status == 1
    assert "8 refused: loss mask of another length" in text


def test_a_format_that_does_not_exist_is_refused_by_the_import(place):
    target = export(place, "speculators")
    status, text = place.call(
        "import", "--run", "results/demo", *SPECULATORS, "--answers", "greedy", "--format", "zip",
        target,
    )  # fmt: skip
    assert status == 1
    assert "expected one of lossless, raw, fp8" in text


@pytest.mark.parametrize(
    ("of", "stated", "message"),
    [
        ("specforge", [*SPECFORGE[:-1], "before"], "after the final norm"),
        ("speculators", [*SPECULATORS[:-1], "after-norm"], "not after the final norm"),
        ("speculators", ["--layer-ids", 2, 4, *SPECULATORS[4:]], "other shapes"),
    ],
)
def test_a_wrong_convention_is_refused(place, of, stated, message):
    target = export(place, of)
    store = empty_store(place)
    status, text = take_in(place, target, stated)
    assert status == 1
    assert message in text
    assert not store.folder.exists()


@pytest.mark.parametrize(
    ("ids", "counting", "message"),
    [
        ([1, 2, 4, 6], "entering", "is added by itself"),
        ([1, 2, 5], "output", "counted by output are"),
        ([4, 2, 1], "entering", "in order"),
    ],
)
def test_layer_ids_that_cannot_be_are_said_to_be_so(place, ids, counting, message):
    stated = ["--layer-ids", *ids, "--counting", counting, "--last-state", "before"]
    target = export(place, "speculators")
    status, text = take_in(place, target, stated)
    assert status == 1
    assert message in text


def test_states_of_another_model_are_refused(place):
    target = export(place, "speculators")
    store = empty_store(place)
    other = place.folder / "other-model"
    shutil.copytree(place.verifier.folder, other)
    weights = load_file(other / "model.safetensors")
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"].roll(7, 0)
    save_file(weights, other / "model.safetensors")
    fingerprint = place.folder / "results/demo/verifier/fingerprint.json"
    write_json(fingerprint, {**json.loads(fingerprint.read_text()), "path": str(other)})
    status, text = take_in(place, target, SPECULATORS)
    assert status == 1
    assert "8 refused: the verifier's head does not lead to the next tokens" in text
    assert not store.folder.exists()


def test_layers_that_differ_from_the_stores_own_stop_the_import(place):
    target = export(place, "speculators")
    for path in target.glob("hidden_states/*.safetensors"):
        data = load_file(path)
        data["hidden_states"][:, 0] = data["hidden_states"][:, 0].roll(1, -1)
        save_file(data, path)
    status, text = take_in(place, target, SPECULATORS)
    assert status == 1
    assert "check --layer-ids and --counting\n" in text


def test_a_last_state_that_alone_differs_points_at_its_own_option(place):
    target = export(place, "specforge")
    status, text = take_in(place, target, [*SPECFORGE[:-1], "before"])
    assert status == 1
    assert "check --last-state\n" in text


def test_without_masks_greedy_answers_cannot_be_checked(place):
    target = export(place, "speculators")
    empty_store(place)
    (place.folder / "results/demo/samples/samples.parquet").unlink()
    shutil.move(target / "hidden_states", place.folder / "alone")
    status, text = take_in(place, place.folder / "alone", SPECULATORS)
    assert status == 1
    assert "8 refused: no loss mask" in text
    assert take_in(place, place.folder / "alone", SPECULATORS, answers="other")[0] == 0
