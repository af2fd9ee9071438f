#!/usr/bin/env python3
"""The plan of a run beside the run's own measurements.

Two plans are made in a folder where nothing has run: one without an earlier run (from the table of
config/hardware.yaml), one with the rates of `--earlier`. Without `--earlier` the run's own rates
are used; that tests what the plan makes of them, not how steady they are.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from common import ROOT, record
from dry_run_scale import FOLDERS

sys.path.insert(0, str(ROOT / "scripts"))


def plan(config: list[Path], store: Path, earlier: Path | None) -> dict:
    """The plan of the configuration in a project without results other than `earlier`."""
    with tempfile.TemporaryDirectory(dir=ROOT) as folder:
        for name in FOLDERS:
            (Path(folder) / name).symlink_to(ROOT / name)
        results = Path(folder) / "results"
        (results / "store").mkdir(parents=True)
        if earlier:
            (results / "store/verifiers").symlink_to(store / "verifiers")
            (results / "earlier").symlink_to(earlier)
            over = Path(folder) / "over.yaml"
            over.write_text("run: later\n", encoding="utf-8")
            config = [*config, over]
        command = [sys.executable, "scripts/plan_run.py", "--json", *map(str, config)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        return json.loads(done.stdout)


def measured(run: Path) -> dict[str, float]:
    """Seconds by stage, and bytes, of a finished run."""
    from aerie.common.stages import benchmark_seconds

    found: dict[str, float] = {}
    for path in sorted(run.glob("benchmarks/*/*.tsv")):
        name = f"{path.parent.name} (s)"
        found[name] = found.get(name, 0) + benchmark_seconds(path)
    lanes = [json.loads(p.read_text()) for p in run.glob("hidden_states/lane-*.json")]
    models = [p for p in run.glob("drafters/*/model/*") if p.is_file()]
    found["everything (s)"] = sum(found.values())
    found["states, raw (bytes)"] = sum(x["raw_bytes"] for x in lanes)
    found["states, stored (bytes)"] = sum(x["bytes"] for x in lanes)
    found["drafters, in run and store (bytes)"] = 2 * sum(p.stat().st_size for p in models)
    found["samples"] = sum(x["samples"] for x in lanes)
    found["tokens"] = sum(x["tokens"] for x in lanes)
    return found


def planned(result: dict) -> dict[str, float]:
    found = {f"{s['stage']} (s)": s["seconds"] for s in result["stages"]}
    b = result["bytes"]
    return {
        **found,
        "everything (s)": result["seconds"],
        "states, raw (bytes)": b["states_raw"],
        "states, stored (bytes)": b["states_stored"],
        "drafters, in run and store (bytes)": b["drafters"],
        "samples": result["counts"]["samples"],
        "tokens": result["counts"]["tokens"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=ROOT / "results/demo", help="a finished run")
    parser.add_argument("--earlier", type=Path, help="a run whose rates the plan uses")
    parser.add_argument("--config", type=Path, nargs="*", default=[], help="of the run")
    args = parser.parse_args()
    run = args.run.resolve()
    if not (run / "report.html").is_file():
        raise SystemExit(f"{args.run}: no finished run; run `make demo` first")
    earlier = (args.earlier or run).resolve()
    config = [path.resolve() for path in args.config]
    truth = measured(run)
    first = planned(plan(config, run.parent / "store", None))
    second = planned(plan(config, run.parent / "store", earlier))
    rows = []
    for name, value in truth.items():
        row = {"what": name, "measured": value, "by the table": first.get(name, 0.0)}
        row["by an earlier run"] = second.get(name, 0.0)
        row["ratio"] = second.get(name, 0.0) / value if value else 0.0
        rows.append({k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()})
    record("plan_against_run", rows, run=run.name, earlier=args.earlier and earlier.name)


if __name__ == "__main__":
    main()
