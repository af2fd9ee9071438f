#!/usr/bin/env python3
"""Speed and memory of collecting prompts: conversations/s and peak memory.

Makes conversations from a ShareGPT file in a temporary folder and runs scripts/collect_prompts.py
on them. From the second round on words are shuffled: lengths are real and near duplicates few.

    python benchmarks/collect_prompts.py --number 1000000
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import ROOT, record


def write_corpus(source: Path, target: Path, number: int) -> None:
    records = [json.loads(line)["conversations"] for line in source.open(encoding="utf-8")]
    rng = random.Random(0)
    with target.open("w", encoding="utf-8") as file:
        for i in range(number):
            turns = records[i % len(records)]
            if i >= len(records):
                turns = [{"from": t["from"], "value": shuffled(t["value"], rng)} for t in turns]
            file.write(json.dumps({"conversations": turns}, ensure_ascii=False) + "\n")


def shuffled(text: str, rng: random.Random) -> str:
    words = text.split(" ")
    rng.shuffle(words)
    return " ".join(words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = ROOT.parent / "shared" / "data" / "conversations.jsonl"
    parser.add_argument("--conversations", type=Path, default=default, help="ShareGPT JSON lines")
    parser.add_argument("--number", type=int, default=1_000_000, help="conversations to collect")
    parser.add_argument("--mode", default="keep", choices=["keep", "generate"])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        corpus, output = Path(folder, "corpus.jsonl"), Path(folder, "prompts")
        write_corpus(arguments.conversations, corpus, arguments.number)
        program = str(ROOT / "scripts" / "collect_prompts.py")
        settings = {
            "corpus": {"sources": [str(corpus)]},
            "generation": {"mode": arguments.mode},
            "evaluation": {},
        }
        command = [sys.executable, program, "--settings", json.dumps(settings)]
        start = time.monotonic()
        process = subprocess.Popen([*command, "--output", str(output)])
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.monotonic() - start
        if os.waitstatus_to_exitcode(status):
            sys.exit("collect_prompts.py failed")
        processor_seconds = usage.ru_utime + usage.ru_stime
        figures = {
            "conversations": arguments.number,
            "corpus_mb": round(corpus.stat().st_size / 1e6),
            "seconds": round(seconds),
            "processor_seconds": round(processor_seconds),
            "conversations_per_second": round(arguments.number / seconds),
            "per_processor_second": round(arguments.number / processor_seconds),
            "peak_rss_mib": round(usage.ru_maxrss / 1024),
        }
        record("collect_prompts", [figures], mode=arguments.mode)


if __name__ == "__main__":
    main()
