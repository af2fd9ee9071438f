"""`store.py export`: other trainers read what it writes."""

import json
import shlex
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from aerie.common.files import write_json
from aerie.extraction.extractor import LaneCounts
from aerie.extraction.run import describe_lane
from aerie.extraction.work import LaneWork
from support.finished_run import SPECULATORS, WIDTH, bits, empty_store, export, take_in


def test_speculators_own_reader_reads_the_export(finished):
    from speculators.data_generation.offline import check_hidden_states
    from speculators.train.data import ArrowDataset

    target = export(finished, "speculators")
    ratio = float(finished.text.split("--train-data-ratio ")[1].split()[0])
    seen = []
    for split in ("train", "val"):
        data = ArrowDataset(64, target, on_missing="raise", train_ratio=ratio, split=split)
        for number in range(len(data)):
            item = data[number]
            ids = item["input_ids"].tolist()
            row = next(r for r in finished.rows.values() if r.input_ids == ids)
            states = finished.states[row.id]
            assert row.split == ("train" if split == "train" else "heldout")
            assert torch.equal(bits(item["hidden_states"]), bits(states[:, :-1].flatten(1)))
            assert torch.equal(bits(item["verifier_last_hidden_states"]), bits(states[:, -1]))
            assert item["loss_mask"].tolist() == [int(m) for m in row.loss_mask]
            seen.append(row.id)
        assert data.approx_lengths == [len(data[n]["input_ids"]) for n in range(len(data))]
    assert sorted(seen) == sorted(finished.rows)
    first = load_file(target / "hidden_states/hs_0.safetensors")
    check_hidden_states(first, finished.rows["record-0"].input_ids)
    assert "--target-layer-ids 1 2 4\n" in finished.text


def test_specforge_files_are_after_the_final_norm(finished):
    target = export(finished, "specforge")
    paths = sorted(target.rglob("*.ckpt"))
    assert [str(p.relative_to(target)) for p in paths] == [
        *(f"heldout/rows_0-5000/data_{n}.ckpt" for n in range(2)),
        *(f"train/rows_0-5000/data_{n}.ckpt" for n in range(6)),
    ]
    for number, path in enumerate(paths):
        row = finished.rows[f"record-{(number + 6) % 8}"]
        states = finished.states[row.id]
        data = torch.load(path, weights_only=True, mmap=True)
        length = len(row.input_ids)
        assert data["input_ids"].tolist() == row.input_ids
        assert data["loss_mask"].tolist() == [int(m) for m in row.loss_mask]
        assert data["input_ids"].dtype == data["loss_mask"].dtype == torch.int64
        assert data["aux_hidden_state"].shape == (1, length, 3 * WIDTH)
        assert torch.equal(bits(data["aux_hidden_state"][0]), bits(states[:, :-1].flatten(1)))
        # SpecForge's target head is the head alone: no norm any more.
        assert data["hidden_state"].shape == (1, length, WIDTH)
        logits = data["hidden_state"][0].float() @ finished.verifier.head.T
        assert logits.argmax(-1).tolist() == [*row.input_ids[1:], row.next_token]
        x = states[:, -1].double()
        rms = (x.pow(2).mean(-1, keepdim=True) + finished.verifier.eps).sqrt()
        expected = x / rms * finished.verifier.norm
        assert torch.allclose(data["hidden_state"][0].double(), expected, rtol=2**-8, atol=1e-6)
    assert "as SpecForge counts: 0 1 3\n" in finished.text


@pytest.mark.parametrize("answers", ["greedy", "other"])
@pytest.mark.parametrize("to", ["speculators", "specforge"])
def test_an_export_prints_the_command_that_imports_it(finished, to, answers):
    generation = {"mode": "generate", "temperature": 0.0 if answers == "greedy" else 0.7}
    write_json(finished.folder / "results/demo/config.json", {"generation": generation})
    target = export(finished, to)
    about = json.loads((target / "aerie.json").read_text())
    assert about["layer_ids"] == ([0, 1, 3] if to == "specforge" else [1, 2, 4])
    assert about["counting"] == ("output" if to == "specforge" else "entering")
    assert about["last_state"] == ("after-norm" if to == "specforge" else "before")
    assert f"{'after' if to == 'specforge' else 'before'} the final norm" in about["meaning"]
    store = empty_store(finished)
    printed = finished.text.split("To take them into a store:\n")[1].splitlines()[0]
    program, script, *command = shlex.split(printed)
    assert (program, script) == (".venv/bin/python", "scripts/store.py")
    assert command[command.index("--answers") + 1] == answers
    status, text = finished.call(*command)
    assert status == 0, text
    assert "8 samples" in text
    assert "no known layout" not in text  # its own files beside the samples
    assert LaneWork(store, finished.rows, finished.shards).number_to_extract() == 0


def test_files_of_unknown_layout_are_counted(finished):
    target = export(finished, "speculators")
    (target / "notes.txt").touch()
    assert "1 files are of no known layout" in take_in(finished, target, SPECULATORS)[1]


def test_an_export_without_all_last_states_says_that_it_cannot_be_imported(finished):
    for number in range(2):
        lane = json.loads(finished.lane(number).read_text())
        lane["convention"]["last_state"] = "supervised"
        write_json(finished.lane(number), lane)
    target = export(finished, "speculators")
    assert "`store.py import` does not take them" in finished.text
    assert "zero where" in json.loads((target / "aerie.json").read_text())["meaning"]


def test_export_refuses_a_folder_that_is_not_empty(finished):
    target = export(finished, "speculators")
    status, text = finished.call("export", "--to", "specforge", "--run", "results/demo", target)
    assert status == 1
    assert "not empty" in text


def test_export_refuses_a_disk_that_is_too_small(finished, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    status, text = finished.call("export", "--to", "speculators", "--run", "results/demo", "new")
    assert status == 1
    assert "are free" in text


def test_export_refuses_a_file_as_its_folder(finished):
    status, text = finished.call(
        "export", "--to", "specforge", "--run", "results/demo", finished.lane(0)
    )
    assert status == 1
    assert "expected the name of a new folder" in text


def test_export_ignores_the_manifests_of_former_lanes(finished):
    """`hidden_states.lanes` was 2 and is 1: lane-1.json is left, and names what lane 0 has too."""
    work = LaneWork(finished.store, finished.rows, finished.shards)
    describe_lane(work, LaneCounts(), 0.0).write(finished.lane(0))
    target = export(finished, "speculators")
    assert "8 samples" in finished.text
    assert len(list(target.glob("hidden_states/*"))) == 8


@pytest.mark.parametrize("what", ["missing", "damaged"])
def test_export_refuses_an_unfinished_extraction(finished, what):
    if what == "missing":
        finished.lane(1).unlink()
    else:
        finished.lane(1).write_text("[]")
    status, text = finished.call("export", "--to", "speculators", "--run", "results/demo", "new")
    assert status == 1
    expected = {
        "missing": "1 shards are not extracted yet; finish the run first",
        "damaged": "lane-1.json: holds no manifest of shards; delete it",
    }
    assert expected[what] in text
    assert not (finished.folder / "new").exists()
