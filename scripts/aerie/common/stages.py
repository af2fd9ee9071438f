"""The stages of a run: the file that each one writes last, and what Snakemake measured of it."""

import csv
from pathlib import Path

OUTPUTS = {
    "import_verifier": "verifier/fingerprint.json",
    "write_prompts": "prompts/self.json",
    "collect_prompts": "prompts/report.json",
    "generate_responses": "responses/manifest.json",
    "tokenize_samples": "samples/report.json",
    "map_vocabulary": "vocabulary/{part}/coverage.json",
    "extract_hidden_states": "hidden_states/lane-{part}.json",
    "train_drafter": "drafters/{part}/metrics.jsonl",
    "measure_acceptance": "evaluation/{part}/acceptance.json",
    "measure_speed": "evaluation/{part}/speed.json",
    "render_report": "report.html",
}
"""Rule → the file in the run's folder that says what came out; in the order of the data."""
STAGES = tuple(OUTPUTS)


def read_benchmark(path: Path) -> dict[str, str]:
    """The last row of one of Snakemake's benchmark files; empty when it cannot be read."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return {k: v for row in csv.DictReader(file, delimiter="\t") for k, v in row.items()}
    except (OSError, UnicodeDecodeError, csv.Error):
        return {}


def benchmark_seconds(path: Path) -> float:
    """`s` of one of Snakemake's benchmark files, 0 when it cannot be read."""
    try:
        return float(read_benchmark(path)["s"])
    except (ValueError, KeyError, TypeError):
        return 0.0
