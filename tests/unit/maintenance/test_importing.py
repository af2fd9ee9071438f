"""`store.py import`: right files are imported, wrong ones refused."""

import gzip
import io
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from aerie.common.files import write_json
from aerie.extraction.work import LaneWork
from aerie.maintenance import importing
from aerie.samples.file import TokenizedSample
from aerie.states.ids import sample_key
from aerie.states.shard import Shard
from support.finished_run import (
    SPECFORGE,
    SPECULATORS,
    VOCABULARY,
    WIDTH,
    bits,
    empty_store,
    export,
    make_row,
    take_in,
)


def test_speculators_files_are_imported_bit_for_bit(finished):
    target = export(finished, "speculators")
    store = empty_store(finished)
    status, text = take_in(finished, target, SPECULATORS)
    assert status == 0, text
    assert "8 samples" in text
    # The next run extracts nothing: it finds all samples by their tokens.
    work = LaneWork(store, finished.rows, finished.shards)
    assert work.number_to_extract() == 0
    for row in finished.rows.values():
        path, number = work.found[sample_key(row.input_ids)]
        with Shard(path) as shard:
            assert shard.convention == finished.convention
            sample = shard.read(number)
        assert torch.equal(bits(sample.states), bits(finished.states[row.id]))
    assert not any(store.has(s.id) for s in finished.shards)  # so the import names them
    assert finished.call("verify")[0] == 1  # the run's own shards are gone
    shutil.rmtree(finished.folder / "results/demo/hidden_states")
    shutil.rmtree(finished.folder / "results/demo")
    finished.call("gc", "--delete")
    assert len(list(store.folder.glob("*.safetensors"))) == 1
    # A second import finds them all there.
    finished.write_run("demo", finished.groups)
    assert "8 were in the store already" in take_in(finished, target, SPECULATORS)[1]


def test_specforge_files_are_imported_up_to_the_length_of_the_last_state(finished):
    target = export(finished, "specforge")
    store = empty_store(finished)
    status, text = take_in(finished, target, SPECFORGE)
    assert status == 0, text
    assert "up to their length" in text
    for row in finished.rows.values():
        path, number = store.find_samples({sample_key(row.input_ids)})[sample_key(row.input_ids)]
        with Shard(path) as shard:
            states = shard.read(number).states
        ours = finished.states[row.id]
        assert torch.equal(bits(states[:, :-1]), bits(ours[:, :-1]))
        # The norm of both is the same, so are the logits.
        norm = torch.nn.RMSNorm(WIDTH, eps=finished.verifier.eps)
        norm.weight.data = finished.verifier.norm
        a, b = norm(states[:, -1].float()), norm(ours[:, -1].float())
        assert torch.allclose(a, b, rtol=2**-6, atol=1e-3)


def write_pt(path: Path, row: TokenizedSample, states: torch.Tensor, **changes) -> None:
    data = {
        "input_ids": torch.tensor(row.input_ids),
        "loss_mask": torch.tensor(row.loss_mask).long(),
        "hidden_states": [states[:, k].clone() for k in range(states.shape[1])],
    }
    torch.save({**data, **changes}, path)


def test_older_pt_files_are_imported(finished):
    folder = finished.folder / "old"
    folder.mkdir()
    for number, row in enumerate(finished.rows.values()):
        write_pt(folder / f"data_{number}.pt", row, finished.states[row.id])
    store = empty_store(finished)
    status, text = take_in(finished, folder, SPECULATORS)
    assert status == 0, text
    assert LaneWork(store, finished.rows, finished.shards).number_to_extract() == 0


class Hostile:
    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return (os.system, (f"touch {self.marker}",))


def test_code_in_a_pickle_does_not_run(finished):
    folder = finished.folder / "hostile"
    folder.mkdir()
    marker = finished.folder / "marker"
    row, states = finished.groups[0][0]
    write_pt(folder / "a.pt", row, states, extra=Hostile(marker))
    (folder / "b.pt").write_bytes(pickle.dumps(Hostile(marker)))
    buffer = io.BytesIO()
    torch.save(Hostile(marker), buffer)
    (folder / "c.ckpt.gz").write_bytes(gzip.compress(buffer.getvalue()))
    empty_store(finished)
    status, text = take_in(finished, folder, SPECULATORS)
    assert status == 1
    assert "3 refused" in text
    assert "0 samples" in text
    assert not marker.exists()


def test_wrong_files_are_counted_by_reason_and_the_others_imported(finished):
    folder = finished.folder / "mixed"
    folder.mkdir()
    rows = list(finished.rows.values())
    states = [finished.states[r.id] for r in rows]

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
    store = empty_store(finished)
    status, text = take_in(finished, folder, SPECULATORS)
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
    (manifest,) = (finished.root / "imports").glob("*.json")
    refused = json.loads(manifest.read_text())["refused"]
    assert len(refused) == 9
    assert store.find_samples({sample_key(rows[0].input_ids)})
    assert len(list(folder.iterdir())) == 11  # the user's files stay where they are


def test_two_files_with_the_same_states_are_both_refused(finished):
    target = export(finished, "speculators")
    first, second = (target / f"hidden_states/hs_{n}.safetensors" for n in range(2))
    data = load_file(second)
    length = len(data["token_ids"]) - 1  # that of the first
    states = load_file(first)["hidden_states"]
    save_file({"hidden_states": states, "token_ids": data["token_ids"][:length]}, second)
    store = empty_store(finished)
    status, text = take_in(finished, target, SPECULATORS, answers="other")
    assert status == 1
    assert "6 samples" in text
    assert "2 refused: the same states as another file's of other tokens" in text
    assert len(list(store.folder.glob("*.safetensors"))) == 1


@pytest.mark.parametrize("kill", ["before the manifest", "after it"])
def test_an_import_names_the_shards_of_a_killed_one(finished, monkeypatch, kill):
    target = export(finished, "speculators")
    store = empty_store(finished)
    shutil.rmtree(finished.folder / "results/demo/hidden_states")
    monkeypatch.setattr("aerie.maintenance.importing.SHARD_BYTES", 1000)  # one a sample
    real, count = importing.write_import, []

    def killed(*arguments):
        count.append(1)
        if kill == "after it":
            real(*arguments)
        if len(count) == 3:
            raise KeyboardInterrupt
        if kill != "after it":
            real(*arguments)

    with monkeypatch.context() as dying:
        dying.setattr("aerie.maintenance.importing.write_import", killed)
        assert take_in(finished, target, SPECULATORS)[0] == 130
    assert len(list(store.folder.glob("*.safetensors"))) == 3
    status, text = take_in(finished, target, SPECULATORS)
    assert (status, "3 were in the store already" in text) == (0, True), text
    (manifest,) = (finished.root / "imports").glob("*.json")
    named = json.loads(manifest.read_text())
    assert {e["file"] for e in named["shards"]} == {p.name for p in store.folder.glob("*.saf*")}
    assert (named["samples"], len(named["shards"])) == (8, 8)
    # Another import from the same folder forgets none of them.
    shutil.rmtree(target / "hidden_states")
    row, states = make_row(finished.verifier, 30)
    (target / "hidden_states").mkdir()
    save_file(
        {"hidden_states": states, "token_ids": torch.tensor(row.input_ids)},
        target / "hidden_states/hs_0.safetensors",
    )
    take_in(finished, target, SPECULATORS, answers="other")
    assert json.loads(manifest.read_text())["samples"] == 9
    assert finished.call("verify")[0] == 0


@pytest.mark.parametrize("kind", ["another", "damaged"])
def test_a_data_set_without_masks_is_refused(finished, kind):
    target = export(finished, "speculators")
    if kind == "another":
        from datasets import Dataset

        shutil.rmtree(target)
        Dataset.from_dict({"text": ["a"]}).save_to_disk(str(target))
        write_pt(target / "a.pt", *finished.groups[0][0])
    else:
        next(target.glob("*.arrow")).write_bytes(b"x")
    status, text = take_in(finished, target, SPECULATORS)
    assert status == 1
    assert "expected a data set with the columns input_ids and loss_mask" in text


def test_a_mask_of_another_length_is_refused(finished):
    from datasets import Dataset

    target = export(finished, "speculators")
    empty_store(finished)
    (finished.folder / "results/demo/samples/samples.parquet").unlink()
    rows = [dict(input_ids=r.input_ids, loss_mask=[1] * 40) for r in finished.rows.values()]
    states = target.rename(finished.folder / "states")
    Dataset.from_list(rows).save_to_disk(str(target))
    (states / "hidden_states").rename(target / "hidden_states")
    status, text = take_in(finished, target, SPECULATORS)
    assert status == 1
    assert "8 refused: loss mask of another length" in text


def test_import_refuses_an_unknown_format(finished):
    target = export(finished, "speculators")
    status, text = finished.call(
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
def test_import_refuses_a_wrong_convention(finished, of, stated, message):
    target = export(finished, of)
    store = empty_store(finished)
    status, text = take_in(finished, target, stated)
    assert status == 1
    assert message in text
    assert not store.folder.exists()


@pytest.mark.parametrize(
    ("ids", "counting", "message"),
    [
        ([1, 2, 4, 6], "entering", "is added automatically"),
        ([1, 2, 5], "output", "counted by output are"),
        ([4, 2, 1], "entering", "in order"),
    ],
)
def test_import_refuses_impossible_layer_ids(finished, ids, counting, message):
    stated = ["--layer-ids", *ids, "--counting", counting, "--last-state", "before"]
    target = export(finished, "speculators")
    status, text = take_in(finished, target, stated)
    assert status == 1
    assert message in text


def test_import_refuses_states_of_another_model(finished):
    target = export(finished, "speculators")
    store = empty_store(finished)
    other = finished.folder / "other-model"
    shutil.copytree(finished.verifier.folder, other)
    weights = load_file(other / "model.safetensors")
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"].roll(7, 0)
    save_file(weights, other / "model.safetensors")
    fingerprint = finished.folder / "results/demo/verifier/fingerprint.json"
    write_json(fingerprint, {**json.loads(fingerprint.read_text()), "path": str(other)})
    status, text = take_in(finished, target, SPECULATORS)
    assert status == 1
    assert "8 refused: the verifier's head does not lead to the next tokens" in text
    assert not store.folder.exists()


def test_import_stops_at_layers_that_differ_from_the_stores(finished):
    target = export(finished, "speculators")
    for path in target.glob("hidden_states/*.safetensors"):
        data = load_file(path)
        data["hidden_states"][:, 0] = data["hidden_states"][:, 0].roll(1, -1)
        save_file(data, path)
    status, text = take_in(finished, target, SPECULATORS)
    assert status == 1
    assert "check --layer-ids and --counting\n" in text


def test_a_differing_last_state_points_at_its_option(finished):
    target = export(finished, "specforge")
    status, text = take_in(finished, target, [*SPECFORGE[:-1], "before"])
    assert status == 1
    assert "check --last-state\n" in text


def test_greedy_answers_without_masks_are_refused(finished):
    target = export(finished, "speculators")
    empty_store(finished)
    (finished.folder / "results/demo/samples/samples.parquet").unlink()
    shutil.move(target / "hidden_states", finished.folder / "alone")
    status, text = take_in(finished, finished.folder / "alone", SPECULATORS)
    assert status == 1
    assert "8 refused: no loss mask" in text
    assert take_in(finished, finished.folder / "alone", SPECULATORS, answers="other")[0] == 0
