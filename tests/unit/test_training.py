import json
import logging

import pytest
import torch

from aerie.config import Drafter
from aerie.hidden_states import Convention, Sample, Store
from aerie.samples import Row
from aerie.training import (
    Recorder,
    ShardDataset,
    ShardTransfer,
    TrainingFailed,
    orthogonalize,
    place_samples,
    whole_checkpoints,
)


@pytest.fixture
def shard(tmp_path):
    """One sample of five tokens; the state of position i in layer k is 10 i + k + less than one."""
    tokens = torch.tensor([5, 6, 7, 8, 9])
    states = torch.stack([torch.full((3, 8), 10.0 * i) for i in range(5)])
    states += torch.arange(3)[None, :, None] + torch.arange(8)[None, None, :] / 8
    store = Store(tmp_path, Convention("f" * 32, (1, 2, 6), 8))
    path = store.write("0" * 32, [Sample("r", tokens, states.to(torch.bfloat16))])
    return str(path)


def row(tokens=(5, 6, 7, 8, 9), mask=(False, False, True, True, True)):
    return Row("r", "r", "s", "train", list(tokens), list(mask), 2, 2)


def test_slots_are_aligned_as_the_convention_says(shard):
    from speculators.models.eagle3.data import shift_batch

    dataset = ShardDataset([row()], ShardTransfer([(shard, 0)]), 16, torch.float32)
    batch = shift_batch(dataset[0])
    # Slot i: embed(x[i+1]), states of position i, teacher after x[i+1], mask of x[i+1].
    assert batch["input_ids"].tolist() == [6, 7, 8, 9]
    assert batch["loss_mask"].tolist() == [False, True, True, True]
    assert [int(x) // 10 for x in batch["hidden_states"][:, 0]] == [0, 1, 2, 3]
    assert [int(x) // 10 for x in batch["verifier_last_hidden_states"][:, 0]] == [1, 2, 3, 4]
    # Layers 1 and 2 are fed side by side, layer 6 is the teacher's.
    assert [int(x) % 10 for x in batch["hidden_states"][0, [0, 8]]] == [0, 1]
    assert int(batch["verifier_last_hidden_states"][0, 0]) % 10 == 2
    assert dataset.approx_lengths == [4]


def test_states_of_other_tokens_stop_the_training(shard):
    dataset = ShardDataset(
        [row(tokens=(5, 6, 7, 8, 1))], ShardTransfer([(shard, 0)]), 16, torch.float32
    )
    with pytest.raises(TrainingFailed, match="belong to other tokens"):
        dataset[0]


def test_a_shard_of_another_size_than_its_manifest_is_named(tmp_path, shard):
    from pathlib import Path

    path = Path(shard)
    entry = {"file": path.name, "bytes": path.stat().st_size, "samples": ["r"]}
    manifest = {"convention": {"key": path.parent.name}, "shards": [entry]}
    found = place_samples({"r": row()}, [manifest], tmp_path)
    assert found["train"][1] == [(shard, 0)]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(Exception, match="missing or cut short"):
        place_samples({"r": row()}, [manifest], tmp_path)


def record(**message):
    found = logging.LogRecord("speculators.metrics", logging.INFO, "", 0, message, (), None)
    found.step = message.get("global_step", 9)
    return found


def train_message(step, loss, dropped=0.0):
    return record(
        train={"loss": loss, "full_acc_0": 0.5, "full_acc_1": 0.2, "error_records": dropped},
        profile={"tokens_per_s": 100.0, "queue_ms": 1.0, "step_ms": 100.0},
        epoch=0,
        lr={"Muon": 0.01, "AdamW": 0.01},
        global_step=step,
    )


def test_metrics_of_a_resumed_training_hold_each_step_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = Recorder(path, 0, lambda _: None)
    for step in range(8):
        first.emit(train_message(step, 1.0))
    path.write_text(path.read_text() + '{"step": 8, "lo')  # cut by a kill
    second = Recorder(path, 5, lambda _: None)
    for step in range(5, 10):
        second.emit(train_message(step, 0.5))
    lines = [json.loads(x) for x in path.read_text().splitlines()]
    assert [x["step"] for x in lines] == list(range(10))
    assert lines[6]["loss"] == 0.5
    assert lines[0]["accuracy"] == [0.5, 0.2]
    assert lines[0]["wait_share"] == 0.01


@pytest.mark.parametrize(
    ("loss", "dropped", "message"),
    [(float("nan"), 0.0, "the loss is nan"), (1.0, 2.0, "dropped samples")],
)
def test_a_training_that_went_wrong_is_stopped(tmp_path, loss, dropped, message):
    recorder = Recorder(tmp_path / "metrics.jsonl", 0, lambda _: None)
    logger = logging.getLogger("aerie.test")
    logger.addHandler(recorder)
    with pytest.raises(TrainingFailed, match=message):
        logger.handle(train_message(3, loss, dropped))


def test_float32_muon_iterates_as_torch_does():
    from torch.optim import _muon

    torch.manual_seed(0)
    for shape in ((64, 96), (96, 64)):
        gradient = torch.randn(shape)
        ours = orthogonalize(gradient, (3.4445, -4.775, 2.0315), 5, 1e-7)
        theirs = _muon._zeropower_via_newtonschulz(gradient, (3.4445, -4.775, 2.0315), 5, 1e-7)
        # torch's own is in bf16.
        assert torch.allclose(ours, theirs.float(), atol=0.05)


def test_a_checkpoint_in_work_is_none(tmp_path):
    (tmp_path / ".writing").mkdir()
    (tmp_path / "step-000000010").mkdir()
    (tmp_path / "step-000000002").mkdir()
    assert [p.name for p in whole_checkpoints(tmp_path)] == ["step-000000002", "step-000000010"]


def test_training_is_the_same_without_the_states_where_no_loss_is_taken(tmp_path, tiny_verifier):
    """Losses and gradients of speculators' own eagle3 model, bit for bit."""
    from speculators.model import SpeculatorModel
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.cli import build_draft_model
    from speculators.train.data import CollateFn

    from aerie.training import _Namespace, _speculators_arguments

    generator = torch.Generator().manual_seed(1)
    rows, samples = [], []
    for number, length in enumerate((40, 23)):
        tokens = torch.randint(3, 400, (length,), generator=generator)
        mask = [12 <= i < 20 or i >= length - 9 for i in range(length)]
        states = torch.randn(length, 4, 128, generator=generator).to(torch.bfloat16)
        samples.append(Sample(f"r{number}", tokens, states, mask))
        rows.append(Row(f"r{number}", "r", "s", "train", tokens.tolist(), mask, 12, 2))
    settings = Drafter(vocabulary="full").model_dump()
    arguments = _speculators_arguments(settings, tiny_verifier, [1, 2, 3], False, False)
    model_class = SpeculatorModel.registry["eagle3"]
    found = {}
    for last_state in ("all", "supervised"):
        store = Store(tmp_path, Convention("f" * 32, (1, 2, 3, 6), 128, "lossless", last_state))
        path = str(store.write("0" * 32, samples))
        dataset = ShardDataset(rows, ShardTransfer([(path, 0), (path, 1)]), 64, torch.float32)
        collate = CollateFn(64, 128, 3, torch.float32, shift_batch)
        batch = collate([dataset[0], dataset[1]])
        torch.manual_seed(0)
        model = build_draft_model(_Namespace(arguments), model_class, None, None, 512)
        _, loss, metrics = model(**batch, **model_class.get_trainer_kwargs(**arguments)[0])
        loss.backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        found[last_state] = (loss, metrics, gradients, batch["verifier_last_hidden_states"])
    (loss, metrics, gradients, states), (loss2, metrics2, gradients2, states2) = found.values()
    assert loss.item() > 0 and len(gradients) > 5
    assert not torch.equal(states, states2)
    assert torch.equal(loss, loss2)
    assert all(torch.equal(metrics[k], metrics2[k]) for k in metrics)
    assert gradients.keys() == gradients2.keys()
    assert all(torch.equal(gradients[k], gradients2[k]) for k in gradients)
