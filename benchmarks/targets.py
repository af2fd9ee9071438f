"""What the benchmarks must reach: `record` writes it into the rows, `run_all.py` checks it."""

from fnmatch import fnmatch
from typing import Any

# Benchmark → pattern for a text in the row, column, comparison, bound.
TARGETS: dict[str, list[tuple[str, str, str, float]]] = {
    "collect_prompts": [("*", "peak_rss_mib", "<=", 2048)],
    "dry_run_scale": [("added", "seconds", "<=", 5), ("large", "memory_mib", "<=", 1024)],
    "extract_states": [
        ("upstream", "ours_is", ">=", 1.1),
        ("discard", "ours_is", ">=", 0.95),
    ],
    "one_pass": [("two passes", "one_pass_is", ">=", 1.3)],
    "read_states_7168": [("lossless", "GB/s", ">=", 1.0)],
    "resume_states": [
        ("resume with all *", "seconds", "<=", 3),
        ("resume with all *", "extracted_tokens", "<=", 0),
        ("one sample *", "shards", "<=", 2),
        ("*tokens that were there already", "extracted_tokens", "<=", 64 * 400),  # one shard
    ],
    "supervisor_overhead": [("*", "share_of_a_core", "<=", 0.01)],
    "write_states_7168": [
        ("lossless", "share of bf16", "<=", 0.67),
        ("lossless", "GB/s, one thread", ">=", 0.5),
        ("lossless", "two over one", ">=", 1.8),
    ],
}


def add_targets(name: str, rows: list[dict[str, Any]]) -> None:
    """Give rows their `target`: conditions such as `seconds <= 3`, joined by semicolons."""
    for pattern, column, sign, bound in TARGETS.get(name, []):
        for row in rows:
            if column in row and any(fnmatch(str(value), pattern) for value in row.values()):
                condition = f"{column} {sign} {bound:g}"
                row["target"] = f"{row['target']}; {condition}" if "target" in row else condition


def misses(row: dict[str, Any]) -> list[str]:
    """The conditions of the row's `target` that it does not meet, each with what was found."""
    found = []
    for condition in filter(None, row.get("target", "").split("; ")):
        column, sign, bound = condition.rsplit(" ", 2)
        value = float(str(row[column]).removesuffix(" x"))
        if not (value >= float(bound) if sign == ">=" else value <= float(bound)):
            found.append(f"{condition}: found {value:.3g}")
    return found
