"""The summary of a run in the terminal: what came out, where it is, and how to serve it."""

from pathlib import Path

from aerie.common.errors import InputError
from aerie.config import read_config
from aerie.report.drafter import TrainedDrafter, read_drafter, speed_words
from aerie.report.serving import serve_command, verifier_name
from aerie.verifier.fingerprint import FINGERPRINT, Fingerprint

RESULTS = Path("results")


def show_summary(folder: Path | None, config_files: list[Path]) -> None:
    """Print the summary of the run in `folder`; None: of the run that the configuration names.

    Raises `InputError` when no drafter was measured yet.
    """
    if folder is None:
        folder = RESULTS / read_config(config_files).get("run", "demo")
    verifier = Fingerprint.read(folder / FINGERPRINT)
    names = sorted(p.parent.name for p in folder.glob("evaluation/*/speed.json"))
    if not names:
        raise InputError(f"{folder}: no drafter was measured yet; run it first (`make run`)")
    drafters = [read_drafter(folder, name) for name in names]
    print(f"\n{folder.name}: drafters for {verifier_name(verifier)}")
    for drafter in drafters:
        print(f"\n{drafter.name}")
        for title, text in describe_drafter(drafter):
            print(f"  {title:<22}{text}")
    best = max(drafters, key=lambda d: d.speeds[0].ratio)
    report = folder / "report.html"
    print(f"\nReport: {report if report.is_file() else 'not made yet'}")
    print(f"Serve it:\n  {serve_command(verifier, best)}")


def describe_drafter(drafter: TrainedDrafter) -> list[tuple[str, str]]:
    """Lines about a drafter: title and text."""
    expectation = drafter.expectation
    lines = [
        (
            "acceptance length",
            f"tokens a verifier step, {drafter.tokens_drafted} drafted at a time; "
            "shares accepted by position",
        )
    ]
    for name, found in drafter.acceptance.prompt_sets.items():
        title = f"  {'held-out' if name == 'heldout' else name}"
        shares = _shares(found.acceptance_per_position)
        length = f"{found.acceptance_length:.2f} on {found.prompts} prompts"
        lines.append((title, f"{length}:  {shares}"))
    if expectation:
        note = f"{expectation.expected:.2f} ({_shares(expectation.accuracy)})"
        if expectation.positions < drafter.tokens_drafted:
            note += f", on the first {expectation.positions} positions"
        lines.append(("validation expected", note))
    for speed in drafter.speeds:
        lines.append(
            (
                f"concurrency {speed.concurrency}",
                f"{speed.without:.1f} tokens/s without, {speed.with_drafter:.1f} with, "
                f"on {speed.prompts} prompts: {speed_words(speed.ratio)}",
            )
        )
    return [*lines, ("folder", str(drafter.model))]


def _shares(values: list[float]) -> str:
    return "  ".join(f"{v:.3f}" for v in values)
