#!/usr/bin/env python3
"""Run benchmarks one after the other; at the end, list the rows that miss their target.

python benchmarks/run_all.py matmul read_states

Exits 1 when a benchmark could not run. A missed target is only listed: figures depend on the
machine, and on what else it is doing.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

from common import RESULTS
from targets import misses


def main(names: list[str]) -> int:
    start, failed = time.time(), []
    for name in names:
        print(f"\n== {name}", flush=True)
        program = Path(__file__).with_name(f"{name}.py")
        if subprocess.run([sys.executable, program], check=False).returncode:
            failed.append(name)
    checked, missed = 0, []
    for path in sorted(RESULTS.glob("*.json")):
        if path.stat().st_mtime < start:
            continue  # of an earlier call
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
            checked += "target" in row
            what = next((str(v) for v in row.values() if isinstance(v, str)), "")
            missed += [f"  {path.stem}, {what}: {miss}" for miss in misses(row)]
    print(f"\n{checked} rows have a target; missed: {len(missed) or 'none'}")
    print(*missed, sep="\n", end="\n" if missed else "")
    if failed:
        print(f"failed (see above): {', '.join(failed)}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
