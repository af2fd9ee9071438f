import logging
import os

import torch
from speculators.model import SpeculatorModel
from speculators.models.eagle3.data import shift_batch
from speculators.train.cli import build_draft_model
from speculators.train.data import CollateFn

from aerie.config import Drafter
from aerie.drafter.data import PlacedSample, ShardDataset
from aerie.drafter.setup import Arguments, follow_hints, speculators_arguments
from aerie.samples.file import TokenizedSample
from aerie.states.convention import Convention
from aerie.states.shard import Sample
from aerie.states.store import Store


def test_states_without_a_loss_do_not_change_the_training(tmp_path, tiny_verifier):
    """Losses and gradients of speculators' own eagle3 model, bit for bit."""
    generator = torch.Generator().manual_seed(1)
    rows, samples = [], []
    for number, length in enumerate((40, 23)):
        tokens = torch.randint(3, 400, (length,), generator=generator)
        mask = [12 <= i < 20 or i >= length - 9 for i in range(length)]
        states = torch.randn(length, 4, 128, generator=generator).to(torch.bfloat16)
        samples.append(Sample(f"r{number}", tokens, states, mask))
        rows.append(TokenizedSample(f"r{number}", "r", "s", "train", tokens.tolist(), mask, 12, 2))
    drafter = Drafter(vocabulary="full")
    arguments = speculators_arguments(drafter, tiny_verifier, [1, 2, 3], False, False)
    model_class = SpeculatorModel.registry["eagle3"]
    found = {}
    for last_state in ("all", "supervised"):
        store = Store(tmp_path, Convention("f" * 32, (1, 2, 3, 6), 128, "lossless", last_state))
        path = store.write("0" * 32, samples)
        dataset = ShardDataset(
            [PlacedSample(r, path, i) for i, r in enumerate(rows)], 64, torch.float32
        )
        collate = CollateFn(64, 128, 3, torch.float32, shift_batch)
        batch = collate([dataset[0], dataset[1]])
        torch.manual_seed(0)
        model = build_draft_model(Arguments(arguments), model_class, None, None, 512)
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


def test_hints_are_followed_on_gpus_and_logged_once(monkeypatch, caplog):
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
