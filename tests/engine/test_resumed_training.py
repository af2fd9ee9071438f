"""A training that was killed and resumed, against one that was not."""

import json

import pytest

from support.processes import run_python

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

TRAIN = """
import hashlib, json, os, signal
from pathlib import Path

if __name__ == "__main__":
    import numpy as np
    import torch
    from aerie.config import Drafter
    from aerie.drafter import trainer as training
    from aerie.drafter.data import place_samples
    from aerie.drafter.errors import TrainingFailed
    from aerie.drafter.metrics import read_metrics
    from aerie.states.convention import Convention
    from aerie.states.manifest import LaneManifest, LaneShard, ManifestConvention
    from aerie.states.shard import Sample
    from aerie.states.store import Store
    from aerie.common.progress import JobProgress
    from aerie.samples.file import TokenizedSample

    root = Path({root!r})
    convention = Convention("f" * 32, (1, 2, 4, 6), 128)
    store = Store(root, convention)
    rows, entries = {{}}, []
    torch.manual_seed(0)
    for number in range(5):
        ids = [f"{{number}}-{{i}}" for i in range(8 if number else 3)]
        samples = []
        for i, identity in enumerate(ids):
            # A sample is one token over and over, so that a batch tells whose it is; some are
            # longer than the sequence.
            length = 20 + 7 * i + 40 * (i == 7)
            token = 8 * number + i + 3
            split = "train" if number else "heldout"
            mask = [t > 4 and t % 30 > 10 for t in range(length)]
            rows[identity] = TokenizedSample(
                identity, identity, "s", split, [token] * length, mask, 5, 3
            )
            tokens = torch.full((length,), token)
            states = torch.randn(length, 4, 128).to(torch.bfloat16)
            samples.append(Sample(identity, tokens, states))
        path = store.path(f"{{number:032d}}")
        if not path.is_file():
            path = store.write(f"{{number:032d}}", samples)
        entries.append(
            LaneShard(
                id=path.stem,
                file=path.name,
                split="train" if number else "heldout",
                samples=ids,
                tokens=0,
                bytes=path.stat().st_size,
                checksum="",
            )
        )
    manifest = LaneManifest(
        convention=ManifestConvention.of(convention),
        shards=entries,
        samples=len(rows),
        tokens=0,
        raw_bytes=0,
        bytes=0,
    )

    seen = []
    set_up = training.ShardTrainer.setup_model

    def setup_model(self):
        set_up(self)

        def note(module, _, batch):
            if module.training:
                seen.append([self.global_step, sorted(set(batch["input_ids"][0].tolist()))])

        self.model.register_forward_pre_hook(note, with_kwargs=True)

    training.ShardTrainer.setup_model = setup_model

    def train(name, kill_at=None, workers=0, before_writing=lambda: None):
        folder = root / name
        folder.mkdir(exist_ok=True)
        drafter = Drafter(
            sequence_length=64,
            epochs=2,
            checkpoint_share=0.3,
            learning_rate=1e-2,
            loader_workers=workers,
        )

        def on_step(line):
            if line.step == kill_at and not line.validation:
                os.kill(os.getpid(), signal.SIGKILL)

        seen.clear()
        packing = training.run_training(
            drafter=drafter,
            verifier=Path({verifier!r}),
            verifier_name="tiny",
            aux_layer_ids=[1, 2, 4],
            maps=None,
            samples=place_samples(rows, [manifest], root),
            folder=folder,
            on_step=on_step,
            progress=JobProgress("train_drafter", 0, "steps"),
            before_writing=before_writing,
        )
        lines = read_metrics(folder / "metrics.jsonl")
        return {{
            "cut": packing["train"].cut_samples,
            "seen": list(seen),
            "steps": [[x.step, x.epoch, x.loss] for x in lines],
            "weights": hashlib.sha256(
                (folder / "model/model.safetensors").read_bytes()
            ).hexdigest(),
        }}

{rest}
"""

KILLED = """
    train("killed", kill_at={step})
"""

RESUMED = """
    found = {}
    import shutil
    shutil.copytree(root / "killed", root / "reordered")
    (order,) = (root / "reordered/checkpoints").glob("*/order.json")
    order.write_text(json.dumps({**json.loads(order.read_text()), "digest": "another"}))
    try:
        train("reordered")
    except TrainingFailed as error:
        found["reordered"] = str(error)
    def lost():
        raise TrainingFailed("another run took it over")

    try:
        train("lost", before_writing=lost)
    except TrainingFailed as error:
        written = [p.name for p in (root / "lost").rglob("*") if p.name != "checkpoints"]
        found["lost"] = [str(error), sorted(written)]
    found |= {"resumed": train("killed", workers=1), "undisturbed": train("undisturbed")}
    damaged = store.path(f"{3:032d}")
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    try:
        train("damaged", workers=1)
    except TrainingFailed as error:
        found["refused"] = str(error)
    found["moved"] = not damaged.exists()
    print("FOUND", json.dumps(found))
"""


def test_a_killed_training_ends_like_an_undisturbed_one(tmp_path, tiny_verifier):
    def run(rest):
        code = TRAIN.format(root=str(tmp_path), verifier=str(tiny_verifier), rest=rest)
        return run_python(code, timeout=600, OMP_NUM_THREADS="1")

    # In the middle of the second epoch, some steps after a checkpoint.
    with pytest.raises(AssertionError, match="exit status -9"):
        run(KILLED.format(step=38))
    (checkpoint,) = (tmp_path / "killed/checkpoints").glob("step-*")
    reached = int(checkpoint.name.split("-")[1])
    assert (tmp_path / "killed/metrics.jsonl").is_file()

    found = json.loads(run(RESUMED).split("FOUND", 1)[1])
    resumed, undisturbed = found["resumed"], found["undisturbed"]
    steps = len(undisturbed["seen"])
    assert steps / 2 < reached < 38 < steps
    # It resumed in the middle of an epoch and saw the same samples in the same order.
    assert resumed["seen"] == undisturbed["seen"][reached:]
    assert resumed["steps"] == undisturbed["steps"]
    assert resumed["weights"] == undisturbed["weights"]
    # Each sample is seen in each epoch.
    assert undisturbed["cut"] > 0
    assert {t for _, batch in undisturbed["seen"] for t in batch} == {0, *range(11, 43)}

    assert "in another order" in found["reordered"]
    error, written = found["lost"]
    assert error == "another run took it over"
    assert written == ["metrics.jsonl"]
    assert found["refused"].startswith(str(tmp_path))
    assert "Start the run again" in found["refused"]
    assert "Traceback" not in found["refused"]
    assert found["moved"]
