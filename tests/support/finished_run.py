"""A finished run whose verifier is only a head, and what `scripts/store.py` does with its store."""

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import save_file

import store as program
from aerie.common import cli
from aerie.common.files import write_json
from aerie.extraction.extractor import LaneCounts
from aerie.extraction.run import describe_lane
from aerie.extraction.work import LaneWork
from aerie.samples.file import TokenizedSample, write_samples
from aerie.samples.shards import ShardList, ShardPlan, plan_shard
from aerie.states.convention import Convention
from aerie.states.shard import Sample
from aerie.states.store import Store
from aerie.verifier.fingerprint import FINGERPRINT
from support.models import make_fingerprint

LAYERS, WIDTH, VOCABULARY = 6, 16, 64
IDS = (1, 2, 4, LAYERS)


def make_head(folder: Path) -> SimpleNamespace:
    """The parts of a checkpoint that a teacher needs: config, tied head, an uneven final norm."""
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


def bits(states: torch.Tensor) -> torch.Tensor:
    return states.contiguous().view(torch.uint16)


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


class FinishedRun:
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

    def write_run(self, name: str, groups) -> list[ShardPlan]:
        run = self.folder / "results" / name
        shards = []
        for group in groups:
            shard = plan_shard(group[0][0].split, [row for row, _ in group])
            samples = [Sample(r.id, torch.tensor(r.input_ids), s) for r, s in group]
            self.store.write(shard.id, samples)
            shards.append(shard)
        make_fingerprint(
            path=str(self.verifier.folder),
            num_layers=LAYERS,
            hidden_size=WIDTH,
            vocab_size=VOCABULARY,
            tokenizer="t" * 32,
        ).write(run / FINGERPRINT)
        (run / "prompts").mkdir(parents=True)
        write_json(run / "responses/manifest.json", {})
        ShardList(shards=shards).write(run / "samples/shards.json")
        write_samples(run / "samples/samples.parquet", [row for g in groups for row, _ in g])
        for lane, part in enumerate((shards[::2], shards[1::2])):
            work = LaneWork(self.store, {row.id: row for g in groups for row, _ in g}, part)
            describe_lane(work, LaneCounts(), 0.0).write(run / f"hidden_states/lane-{lane}.json")
        return shards

    def path(self, number: int) -> Path:
        return self.store.path(self.shards[number].id)

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


def export(finished, to: str) -> Path:
    target = finished.folder / f"for-{to}"
    status, text = finished.call("export", "--to", to, "--run", "results/demo", target)
    assert status == 0, text
    finished.text = text
    return target


SPECULATORS = ["--layer-ids", 1, 2, 4, "--counting", "entering", "--last-state", "before"]
SPECFORGE = ["--layer-ids", 0, 1, 3, "--counting", "output", "--last-state", "after-norm"]


def empty_store(finished) -> Store:
    shutil.rmtree(finished.store.folder)
    return finished.store


def take_in(finished, folder: Path, stated, answers="greedy"):
    return finished.call("import", "--run", "results/demo", *stated, "--answers", answers, folder)
