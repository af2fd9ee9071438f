"""Whole runs of the workflow with a tiny verifier."""

import json
import random
from pathlib import Path

import yaml

from support.models import TINY_ENGINE

NOUNS = "apples boats letters trains friends lakes roads plans answers reasons children stories"


def configuration(verifier: Path, run: str, **over) -> dict:
    return {
        "run": run,
        "verifier": {"source": str(verifier)},
        "corpus": {"sources": ["prompts.jsonl"], "heldout_share": 0.1, "decontaminate": False},
        "generation": {"max_tokens": 24, **over.get("generation", {})},
        "samples": {"max_length": 128, "min_supervised_tokens": 4},
        "hidden_states": {"aux_layer_ids": [1, 2, 4], "samples_per_shard": 16},
        "engine": TINY_ENGINE,
        "drafters": {
            "base": {
                "vocabulary": 256,
                "epochs": 2,
                "sequence_length": 128,
                "checkpoint_share": 0.2,
                **over.get("drafter", {}),
            }
        },
        "evaluation": {
            "prompt_sets": {"other": "other.jsonl"},
            "max_prompts": 6,
            "max_tokens": 16,
            "speed_prompts": 2,
        },
    }


def write_prompts(path: Path, count: int, seed: int = 0) -> None:
    choose = random.Random(seed)
    nouns = NOUNS.split()
    rows = [
        {"prompt": f"write {i} words about {choose.choice(nouns)} and {choose.choice(nouns)}"}
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write(project, values) -> None:
    (project.folder / "config/config.yaml").write_text(yaml.safe_dump(values))


def logs(project, done) -> str:
    tails = [p.read_text()[-1500:] for p in project.folder.glob("results/*/logs/*/*.log")]
    return "\n".join([done.stdout[-3000:], done.stderr[-3000:], *tails])
