"""Stand-ins for the scripts, for tests of the workflow alone."""

import json

from aerie.common.stages import STAGES
from aerie.states.convention import Convention
from aerie.states.manifest import LaneManifest, ManifestConvention
from support.models import make_fingerprint

FAR = set(STAGES) - {"write_prompts"}
"""Rules that run for the demo's configuration."""

EMPTY_LANE = LaneManifest(
    convention=ManifestConvention.of(Convention("f" * 32, (2, 15, 27, 30), 576)),
    shards=[],
    samples=0,
    tokens=0,
    raw_bytes=0,
    bytes=0,
)

# Stands for every script: creates what it is told to write.
STAND_IN = """
import json, sys
from pathlib import Path

LANE = LANE_MANIFEST
FINGERPRINT = FINGERPRINT_RECORD
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
        contents = {"import_verifier": FINGERPRINT, "extract_hidden_states": json.dumps(LANE)}
        path.write_text(contents.get(name, "{}"))
"""
STAND_IN = STAND_IN.replace("LANE_MANIFEST", repr(EMPTY_LANE.as_json()))
STAND_IN = STAND_IN.replace("FINGERPRINT_RECORD", repr(json.dumps(make_fingerprint().as_json())))
