"""Stand-ins for the scripts, for tests of the workflow alone."""

import json

from aerie.common.stages import STAGES
from support.models import make_fingerprint

FAR = set(STAGES) - {"write_prompts"}
"""Rules that run for the demo's configuration."""

# Stands for every script: creates what it is told to write.
STAND_IN = f"FINGERPRINT = {json.dumps(make_fingerprint().as_json())!r}\n"
STAND_IN += """
import sys
from pathlib import Path

written = {"--output", "--samples", "--shards", "--report", "--model", "--metrics"}
name = Path(sys.argv[0]).stem
arguments = sys.argv[1:]
for flag, value in zip(arguments, arguments[1:]):
    path = Path(value)
    if flag not in written or (flag == "--samples" and name != "tokenize_samples"):
        continue
    if flag == "--shards" and name != "tokenize_samples":
        continue
    if name == "collect_prompts" or (name == "map_vocabulary" and flag == "--output"):
        path.mkdir(parents=True, exist_ok=True)
        names = {
            "collect_prompts": ["train.jsonl.zst", "heldout.jsonl.zst", "report.json"],
            "map_vocabulary": ["t2d.npy", "d2t.npy", "coverage.json"],
        }[name]
        for part in names:
            (path / part).write_text("{}")
    elif flag == "--model":
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text("{}")
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(FINGERPRINT if name == "import_verifier" else "{}")
"""
