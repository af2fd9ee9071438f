"""The triage of a supervised job's log while it is written."""

import contextlib
from collections import Counter

from aerie.common.errors import InputError
from aerie.common.paths import LOG_PATTERNS
from aerie.common.text import shorten
from aerie.watching.catalogue import Catalogue
from aerie.watching.pump import Pump
from aerie.watching.triage import Triage


class LogJudge:
    """Judges the lines that a pump copies. Without a readable catalogue it judges nothing: the job
    does not depend on it."""

    def __init__(self, pump: Pump):
        self.pump = pump
        self._triage: Triage | None = None
        with contextlib.suppress(InputError):
            self._triage = Triage(Catalogue.load(LOG_PATTERNS))

    def read(self) -> list[str]:
        """Take in the lines since the last call and return them."""
        lines = self.pump.take()
        if self._triage is not None and lines:
            self._triage.feed("\n".join(lines) + "\n")
        return lines

    def counts(self) -> dict[str, int]:
        """Messages by class without the benign ones, and lines that were skipped."""
        counts: Counter[str] = Counter()
        for finding in self._triage.so_far() if self._triage is not None else []:
            if finding.level != "benign":
                counts[finding.level] += finding.count
        if self.pump.skipped:
            counts["not judged"] = self.pump.skipped
        return dict(counts)

    def last_words(self) -> str:
        """`: ` and the job's last line, then what the triage says of a fatal message."""
        lines = [line for line in self.pump.last if line.strip()]
        words = f": {shorten(lines[-1], 400)}" if lines else ""
        findings = self._triage.finish() if self._triage is not None else []
        if findings and findings[0].level == "fatal":
            worst = findings[0]
            words += f"\n{worst.text}\n{worst.meaning}\n{worst.advice}"
        return words
