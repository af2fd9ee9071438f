"""What every benchmark does with its figures: print a small table and keep them as JSON."""

import os
import platform
import sys
from pathlib import Path
from typing import Any

from targets import add_targets

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results" / "benchmarks"
sys.path.insert(0, str(ROOT / "scripts"))


def record(name: str, rows: list[dict[str, Any]], **machine: Any) -> Path:
    """Print `rows` as a table and write them to results/benchmarks/<name>.json.

    Rows that must reach something get it as `target` (targets.py). `machine`: what else the
    figures depend on (model, inputs, settings, versions).
    """
    from aerie.common.files import write_json

    add_targets(name, rows)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = [columns, *([_text(row.get(key, "")) for key in columns] for row in rows)]
    widths = [max(len(line[i]) for line in table) for i in range(len(columns))]
    for line in table:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    machine = {"cores": os.cpu_count(), "processor": processor(), **machine}
    print(", ".join(f"{key}: {value}" for key, value in machine.items()))
    path = RESULTS / f"{name}.json"
    write_json(path, {"name": name, "machine": machine, "rows": rows})
    return path


def _text(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
