"""The result of one check."""

from dataclasses import asdict, dataclass

SEVERITIES = ("ok", "note", "warning", "error")


@dataclass
class CheckResult:
    """What a check found.

    `severity`: ok; note (good to know); warning (the run may fail or come out worse); error (it
    cannot work). `meaning`: what `found` means for this run. `advice`: what to do.
    """

    check: str
    severity: str
    found: str
    meaning: str = ""
    advice: str = ""

    def as_json(self) -> dict[str, str]:
        return asdict(self)


def worst(results: list[CheckResult]) -> str:
    """The gravest severity; ok when nothing was checked."""
    return max((r.severity for r in results), key=SEVERITIES.index, default="ok")
