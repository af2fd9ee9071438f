#!/usr/bin/env python3
"""Answers and hidden states in one pass against two: seconds, model loads counted.

One: `scripts/generate_responses.py` with capture. Two: without, and then
`scripts/extract_hidden_states.py`. The same prompts and settings, a fresh store for each.

    python benchmarks/one_pass.py --samples 200
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import extraction_inputs as inputs
from common import ROOT, record


def call(script: str, *arguments: object) -> float:
    command = [sys.executable, str(ROOT / "scripts" / script), *map(str, arguments)]
    start = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout[-2000:] + done.stderr[-4000:])
    return time.monotonic() - start


def main() -> None:
    parser = inputs.parser(__doc__.splitlines()[0], 200)
    parser.add_argument("--max-tokens", type=int, default=96, help="an answer")
    args = parser.parse_args()
    verifier = inputs.verifier(args.source)
    from aerie.common.files import digest, write_json_lines

    prompts = list(dict.fromkeys(m[0]["content"] for m in inputs.records(args.conversations)))
    prompts = [p for p in prompts if len(p) < 1200][: args.samples]
    train = [
        {
            "id": digest(text),
            "source": "benchmark",
            "messages": [{"role": "user", "content": text}],
        }
        for text in prompts
    ]
    engine = {**inputs.ENGINE, "max_num_seqs": 64}
    table = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fingerprint = folder / "fingerprint.json"
        verifier.write(fingerprint)
        write_json_lines(folder / "train", train)
        write_json_lines(folder / "heldout", [])
        settings = {
            "generation": {"max_tokens": args.max_tokens},
            "samples": {
                "max_length": args.max_length,
                "min_supervised_tokens": 1,
                "max_lost_share": 1,
            },
            "hidden_states": {"samples_per_shard": 64},
            "engine": engine,
            "verifier": {},
        }
        for side, capture in (("one pass", True), ("two passes", False)):
            store, out = folder / side, folder / f"{side} out"
            settings["generation"]["capture"] = capture
            tokenizing = {n: settings[n] for n in ("samples", "hidden_states", "verifier")}
            prompt_files = ["--train", folder / "train", "--heldout", folder / "heldout"]
            row = {
                "side": side,
                "answers": call(
                    "generate_responses.py",
                    *(*prompt_files, "--verifier", fingerprint, "--store", store),
                    *("--settings", json.dumps(settings), "--output", out / "manifest.json"),
                ),
            }
            call(
                "tokenize_samples.py",
                *(*prompt_files, "--verifier", fingerprint, "--store", store),
                *("--responses", out / "manifest.json", "--settings", json.dumps(tokenizing)),
                *("--samples", out / "s", "--shards", out / "shards", "--report", out / "r"),
            )
            row["states"] = call(
                "extract_hidden_states.py",
                *("--verifier", fingerprint, "--store", store, "--lane", 0),
                *("--samples", out / "s", "--shards", out / "shards"),
                *("--settings", inputs.extraction_settings(engine, args.max_length)),
                *("--output", out / "lane.json"),
            )
            lane = json.loads((out / "lane.json").read_text())
            row["seconds"] = row["answers"] + row["states"]
            row |= {"extracted_in_second": lane["extracted_samples"], "tokens": lane["tokens"]}
            table.append(row)
    table[1]["one_pass_is"] = f"{table[1]['seconds'] / table[0]['seconds']:.2f} x"
    record(
        "one_pass",
        table,
        verifier=verifier.source,
        prompts=len(prompts),
        max_tokens=args.max_tokens,
        engine=engine,
    )


if __name__ == "__main__":
    main()
