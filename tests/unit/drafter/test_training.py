import json
import logging
import os
from pathlib import Path

import pytest
import torch

from aerie.common.errors import InputError
from aerie.config import Drafter
from aerie.drafter.trainer import (
    PackSampler,
    Recorder,
    ShardDataset,
    ShardTransfer,
    TrainingFailed,
    describe_packing,
    follow_hints,
    orthogonalize,
    place_samples,
    whole_checkpoints,
)
from aerie.samples.file import TokenizedSample
from aerie.states.convention import Convention
from aerie.states.shard import Sample
from aerie.states.store import Store


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
    return TokenizedSample("r", "r", "s", "train", list(tokens), list(mask), 2, 2)


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
    with pytest.raises(TrainingFailed, match=r"belong to other tokens.*moved.*Start the run again"):
        dataset[0]
    assert not Path(shard).exists()  # so the next run makes it anew


def test_last_states_of_another_loss_mask_stop_the_training(tmp_path):
    """They are zeros where this mask takes a loss, and would be learned from as such."""
    tokens, mask = torch.arange(5, 10), [False, False, True, True, True]
    convention = Convention("f" * 32, (1, 2, 6), 8, last_state="supervised")
    store = Store(tmp_path, convention)
    states = torch.randn(5, 3, 8).bfloat16()
    path = str(store.write("0" * 32, [Sample("r", tokens, states, mask)]))
    transfer = ShardTransfer([(path, 0)])
    ShardDataset([row(mask=mask)], transfer, 16, torch.float32)[0]
    wrong = ShardDataset([row(mask=[False, True, *mask[2:]])], transfer, 16, torch.float32)
    with pytest.raises(TrainingFailed, match=r"another loss mask.*Start the run again"):
        wrong[0]


@pytest.mark.parametrize("what", ["a lane too few", "another corpus", "another convention"])
def test_manifests_that_are_not_those_of_the_samples_train_nothing(tmp_path, shard, what):
    path = Path(shard)
    entry = {"file": path.name, "bytes": path.stat().st_size, "samples": ["r"]}
    manifest = {"convention": {"key": path.parent.name}, "shards": [entry], "quarantined": {}}
    rows, other = {"r": row()}, {**manifest, "shards": [], "quarantined": {"q": "no"}}
    if what == "a lane too few":
        rows["q"] = row()
        assert place_samples(rows, [manifest, other], tmp_path)["train"][1] == [(shard, 0)]
        manifests = [manifest]
    elif what == "another corpus":
        manifests = [manifest, other]
    else:
        rows["q"] = row()
        manifests = [manifest, {**other, "convention": {"key": "x"}}]
    with pytest.raises(InputError, match=r"lane-\*\.json"):
        place_samples(rows, manifests, tmp_path)


def test_a_damaged_shard_is_named_and_moved_aside(shard):
    damaged = bytearray(Path(shard).read_bytes())
    damaged[-1] ^= 1
    Path(shard).write_bytes(damaged)
    dataset = ShardDataset([row()], ShardTransfer([(shard, 0)]), 16, torch.float32)
    with pytest.raises(TrainingFailed, match=rf"{shard}.*moved.*Start the run again"):
        dataset[0]
    assert not Path(shard).exists()
    assert (Path(shard).parent / "damaged" / Path(shard).name).read_bytes() == bytes(damaged)
    # Another worker that comes to it later says so too.
    with pytest.raises(TrainingFailed, match="Start the run again"):
        ShardDataset([row()], ShardTransfer([(shard, 0)]), 16, torch.float32)[0]


def test_a_long_sample_is_trained_on_in_pieces_at_its_own_positions(shard):
    from speculators.models.eagle3.data import shift_batch

    sample = row(mask=(False, False, True, False, True))
    dataset = ShardDataset([sample], ShardTransfer([(shard, 0)]), 2, torch.float32)
    first, second = (shift_batch(dataset[i]) for i in range(len(dataset)))
    assert dataset.approx_lengths == [2, 1]
    assert first["input_ids"].tolist() == [6, 7]
    assert second["input_ids"].tolist() == [9]
    assert second["loss_mask"].tolist() == [True]
    assert second["position_ids"].tolist() == [4]
    assert int(second["hidden_states"][0, 0]) // 10 == 3
    assert int(second["verifier_last_hidden_states"][0, 0]) // 10 == 4


def test_an_answer_longer_than_a_sequence_is_learned_once(shard):
    from speculators.models.eagle3.data import shift_batch

    sample = row(mask=(False, True, True, True, True))
    dataset = ShardDataset([sample], ShardTransfer([(shard, 0)]), 2, torch.float32)
    parts = [shift_batch(dataset[i]) for i in range(len(dataset))]
    learned = [int(x) for p in parts for x in p["input_ids"][p["loss_mask"]]]
    assert learned == [6, 7, 8, 9]
    assert all(len(p["input_ids"]) <= 2 for p in parts)
    sampler = PackSampler(dataset, 2, seed=0, shuffle=True)
    assert describe_packing(dataset, sampler)["cut_samples"] == 1


@pytest.mark.parametrize("storage", ["lossless", "fp8", "raw"])
@pytest.mark.parametrize("last_state", ["all", "supervised"])
def test_the_order_does_not_depend_on_lanes_or_storage(tmp_path, storage, last_state):
    store = Store(tmp_path, Convention("f" * 32, (1, 2, 6), 8, storage, last_state))
    entries, rows = [], {}
    for name in "cab":
        tokens, mask = torch.arange(ord(name), ord(name) + 5), [False, True, True, False, True]
        sample = Sample(name, tokens, torch.randn(5, 3, 8).bfloat16(), mask)
        key = store.key(tokens.tolist(), mask)  # a shard's name comes from keys such as this
        path = store.write(key, [sample])
        entries.append({"file": path.name, "bytes": path.stat().st_size, "samples": [name]})
        rows[name] = TokenizedSample(name, name, "s", "train", tokens.tolist(), mask, 2, 2)
    convention = {"key": store.convention.key}

    def order(*lanes):
        manifests = [{"convention": convention, "shards": shards} for shards in lanes]
        return [r.id for r in place_samples(rows, manifests, tmp_path)["train"][0]]

    assert order(entries) == order(entries[1:], entries[:1]) == ["a", "b", "c"]


def test_ranks_share_the_sequences_of_an_epoch_and_go_on_in_its_middle(shard, monkeypatch):
    count = 50
    rows = [row(tokens=range(9), mask=[True] * 9) for _ in range(count)]
    dataset = ShardDataset(rows, ShardTransfer([(shard, 0)] * count), 16, torch.float32)
    monkeypatch.setattr("aerie.drafter.trainer.get_dp_size", lambda: 2)
    batches = []
    for rank in range(2):
        monkeypatch.setattr("aerie.drafter.trainer.get_dp_rank", lambda rank=rank: rank)
        sampler = PackSampler(dataset, 16, seed=3, shuffle=True)
        sampler.set_epoch(1)
        batches.append(list(sampler))
        # What speculators' trainer does to go on after five steps.
        sampler._cached_generated_batches = (1, sampler._generate_batches(1)[5:])
        assert list(sampler) == batches[-1][5:]
        sampler.set_epoch(2)
        assert len(sampler) == len(batches[-1])
    assert len(batches[0]) == len(batches[1]) == 13
    assert sorted(i for rank in batches for batch in rank for i in batch) == list(range(count))


def test_a_shard_of_another_size_than_its_manifest_is_named(tmp_path, shard):
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


def train_message(step, loss, dropped=0.0, accuracy=0.5):
    return record(
        train={
            "loss": loss,
            "full_acc_0": accuracy,
            "full_acc_1": 0.4 * accuracy,
            "error_records": dropped,
        },
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
    [
        (float("nan"), 0.0, "the loss is nan"),
        (1.0, 2.0, "dropped samples"),
        (0.0, 0.0, "exactly 0"),
    ],
)
def test_a_training_that_went_wrong_is_stopped(tmp_path, loss, dropped, message):
    recorder = Recorder(tmp_path / "metrics.jsonl", 0, lambda _: None)
    logger = logging.getLogger("aerie.test")
    logger.addHandler(recorder)
    with pytest.raises(TrainingFailed, match=message):
        logger.handle(train_message(3, loss, dropped))


def test_an_accuracy_that_stays_zero_after_the_warm_up_stops_the_training(tmp_path):
    recorder = Recorder(tmp_path / "metrics.jsonl", 0, lambda _: None, warmup_steps=100)
    for step in range(100):
        recorder.emit(train_message(step, 1.0, accuracy=0.0))  # nothing is learnt yet
    for step in range(100, 115):
        recorder.emit(train_message(step, 1.0, accuracy=0.0))
    recorder.emit(train_message(115, 1.0, accuracy=0.01))  # one hit, and it counts anew
    with pytest.raises(TrainingFailed, match="step 135: the accuracy has been exactly 0"):
        for step in range(116, 200):
            recorder.emit(train_message(step, 1.0, accuracy=0.0))


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

    from aerie.drafter.trainer import _Namespace, _speculators_arguments

    generator = torch.Generator().manual_seed(1)
    rows, samples = [], []
    for number, length in enumerate((40, 23)):
        tokens = torch.randint(3, 400, (length,), generator=generator)
        mask = [12 <= i < 20 or i >= length - 9 for i in range(length)]
        states = torch.randn(length, 4, 128, generator=generator).to(torch.bfloat16)
        samples.append(Sample(f"r{number}", tokens, states, mask))
        rows.append(TokenizedSample(f"r{number}", "r", "s", "train", tokens.tolist(), mask, 12, 2))
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


def test_what_the_hints_ask_for_is_set_on_gpus_and_said_once(monkeypatch, caplog):
    precision, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "backend:native")  # the user's own
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    try:
        with caplog.at_level(logging.INFO, "aerie"):
            for rank in ("0", "1"):
                monkeypatch.setenv("RANK", rank)
                follow_hints()
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.get_num_threads() == 4
        (line,) = caplog.messages
        assert "PYTORCH_ALLOC_CONF=backend:native" in line
        assert "TOKENIZERS_PARALLELISM=false, 4 threads" in line
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.set_num_threads(threads)
        os.environ.pop("TOKENIZERS_PARALLELISM", None)
