#!/usr/bin/env python3
"""Say in a few lines what came out of a run, where it lies, and how to serve it."""

from pathlib import Path

from aerie.common import cli
from aerie.common.errors import InputError
from aerie.report.page import (
    Drafter,
    read_drafter,
    read_object,
    serve_command,
    speed_words,
    verifier_name,
)


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("run", type=Path, nargs="?", help="its folder, such as results/demo")
    parser.add_argument(
        "--configfile", type=Path, nargs="*", default=[], help="in its place: a configuration's run"
    )
    args = parser.parse_args()
    if args.run is None:
        from aerie.config import read_config  # takes longer than all the rest

        args.run = Path("results") / read_config(args.configfile).get("run", "demo")
    verifier = read_object(args.run / "verifier/fingerprint.json", "source", "path")
    names = sorted(p.parent.name for p in args.run.glob("evaluation/*/speed.json"))
    if not names:
        raise InputError(f"{args.run}: no drafter was measured yet; run it first (`make run`)")
    drafters = [read_drafter(args.run, name) for name in names]
    print(f"\n{args.run.name}: drafters for {verifier_name(verifier)}")
    for drafter in drafters:
        print(f"\n{drafter.name}")
        for title, text in summary(drafter):
            print(f"  {title:<22}{text}")
    best = max(drafters, key=lambda d: d.speeds[0]["ratio"])
    report = args.run / "report.html"
    print(f"\nReport: {report if report.is_file() else 'not made yet'}")
    print(f"Serve it:\n  {serve_command(verifier, best)}")


def summary(drafter: Drafter) -> list[tuple[str, str]]:
    """Lines about a drafter: title and text."""
    expectation = drafter.expectation
    lines = [
        (
            "acceptance length",
            f"tokens a verifier step, {drafter.tokens_drafted} drafted at a time; "
            "shares accepted by position",
        )
    ]
    for name, found in drafter.acceptance["prompt_sets"].items():
        title = f"  {'held-out' if name == 'heldout' else name}"
        prompts = f" on {found['prompts']} prompts" if found.get("prompts") else ""
        shares = _shares(found["acceptance_per_position"])
        lines.append((title, f"{found['acceptance_length']:.2f}{prompts}:  {shares}"))
    if expectation:
        note = f"{expectation.expected:.2f} ({_shares(expectation.accuracy)})"
        if expectation.positions < drafter.tokens_drafted:
            note += f", on the first {expectation.positions} positions"
        lines.append(("validation expected", note))
    for speed in drafter.speeds:
        lines.append(
            (
                f"concurrency {speed['concurrency']}",
                f"{speed['without']:.1f} tokens/s without, {speed['with']:.1f} with, "
                f"on {speed['prompts']} prompts: {speed_words(speed['ratio'])}",
            )
        )
    return [*lines, ("folder", str(drafter.model))]


def _shares(values: list[float]) -> str:
    return "  ".join(f"{v:.3f}" for v in values)


if __name__ == "__main__":
    cli.run(main)
