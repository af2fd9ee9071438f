"""What the messages of a log mean: those in the catalogue, tracebacks, and the unknown rest.

A log is read as a stream in constant memory, whichever program wrote it.
"""

import re
from dataclasses import dataclass, field
from typing import Any

from aerie.watching.catalogue import Catalogue, Pattern, Search
from aerie.watching.log_lines import GLOG, TEXT, Line, clean, fold

ORDER = ("fatal", "degraded", "unknown", "hint", "benign")
"""Classes as they are shown. The catalogue has all but `unknown`."""

LONGEST = 1 << 14  # characters; longer lines are judged in pieces, as searches take quadratic time
KINDS = 2000  # distinct unknown messages; further ones are counted together
STREAMS = 256  # processes whose tracebacks are followed at a time
PATIENCE = 20  # lines after an exception in which its chain may continue
LAST_LINES = 25  # a traceback with fewer other lines after it was the last message

# A line without any of these words, and without the catalogue's, reports nothing wrong.
_WORDS = (
    *("WARN", "ERROR", "CRITICAL", "FATAL", "Warning", "Error", "Exception"),
    *("Traceback", "error: ", "fatal: "),
)
_SUSPICIOUS = re.compile(
    r"\b(?:WARNING|ERROR|CRITICAL|FATAL)\b|(?:Warning|Error|Exception): "
    r"|^(?:error|fatal): |: error: "
)
_HEADER = "Traceback (most recent call last):"
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<name>\S+))?')
_ERROR = re.compile(
    r"^(?:\w+\.)*(?:[A-Z]\w*(?:: .*|:)$|[A-Z]\w*(?:Error|Exception|Exit|Interrupt)$)"
)
_DOTTED = re.compile(r"^(?:\w+\.)+[A-Z]\w*$")
_CHAIN = ("During handling of the above exception", "The above exception was the direct cause")
_GUTTER = re.compile(r"^\s+[|+] ?")
_RULE = re.compile(r"^\s*\+[-+]*-{8,}.*$")


@dataclass
class Finding:
    """A message or traceback with its meaning.

    `first_line` counts from 1. `id` is None for what the catalogue does not know; then `level` is
    `unknown`, or `fatal` for a traceback that was the last message.
    """

    level: str
    id: str | None
    count: int
    first_line: int
    text: str
    meaning: str
    advice: str
    consequence: bool = False

    def as_json(self) -> dict[str, Any]:
        return {
            "class": self.level,
            "id": self.id,
            "count": self.count,
            "first_line": self.first_line,
            "text": self.text,
            "meaning": self.meaning,
            "advice": self.advice,
        }


@dataclass
class _Trace:
    """A traceback while it is read."""

    first_line: int
    group: bool
    ignored: bool
    errors: list[str] = field(default_factory=list)
    frame: str = ""
    inside: bool = True  # between header and exception
    code_follows: bool = False
    chained: bool = False
    others: int = 0  # lines since then that are not its own
    end: int = 0  # lines outside of tracebacks before its last line


class Triage:
    """Judges the lines of one log, block by block."""

    def __init__(self, catalogue: Catalogue):
        self.catalogue = catalogue
        self.lines = 0
        self._found: dict[tuple[str, str], Finding] = {}
        self._open: dict[str, _Trace] = {}
        self._ends: dict[tuple[str, str], int] = {}  # of tracebacks that are not in the catalogue
        self._ignored: dict[str, int] = {}
        self._outside = 0
        self._overflow: Finding | None = None
        self._beyond: tuple[Finding, int] | None = None  # last overflow, its end

    def feed(self, block: str) -> None:
        """Take in the next lines."""
        among = self.catalogue.among(block)
        glog = GLOG.search(block) is not None
        words = [w for w in _WORDS if w in block]
        ends = block.count("\n")
        if not (among or glog or words or self._open):
            self.lines += ends
            self._outside += ends
            return
        number = self.lines
        quick = [*words, *(s[0] for s in among)]
        for line in block.split("\n"):
            number += 1
            if self._open or any(q in line for q in quick) or (glog and GLOG.search(line)):
                for part in line.split("\r"):
                    for start in range(0, len(part) or 1, LONGEST):
                        self._take(part[start : start + LONGEST], number, among)
            else:
                self._outside += 1
        self.lines += ends

    def _take(self, raw: str, number: int, among: list[Search]) -> None:
        line = clean(raw)
        known = self.catalogue.match(line.text, among) if line.text else None
        if self._follow(line, number, known):
            return
        if not line.text:
            return
        self._outside += 1
        if line.text.startswith("Exception ignored in"):
            self._ignored[line.stream] = number
        if known:
            self._add_known(known, number, line.text)
        elif line.level in ("INFO", "DEBUG"):
            return
        elif line.level or _SUSPICIOUS.search(line.text):
            text = f"{line.level}: {line.text}" if line.level else line.text
            self._add_unknown(
                ("line", fold(text)),
                number,
                text,
                "a warning or an error that the catalogue does not know",
                "judge it by its words; add it to config/log_patterns.yaml once you know",
            )

    # Tracebacks

    def _follow(self, line: Line, number: int, known: Pattern | None) -> bool:
        """Whether the line belongs to a traceback of its stream."""
        trace = self._open.get(line.stream)
        text = line.text
        if text.endswith(_HEADER):
            group = "Exception Group" in text
            if trace is not None and not (trace.inside or trace.chained or trace.group):
                self._close(line.stream)
                trace = None
            if trace is None:
                if len(self._open) >= STREAMS:
                    self._close(next(iter(self._open)))
                ignored = number - self._ignored.get(line.stream, -9) <= 2
                self._open[line.stream] = trace = _Trace(number, group, ignored)
            trace.inside, trace.chained, trace.others = True, False, 0
            trace.group |= group
            return True
        if trace is None:
            return False
        if trace.group:
            if _RULE.match(text):
                return True
            text, gutters = _GUTTER.subn("", text)
            if not gutters and text and not trace.inside and not text.startswith(_CHAIN):
                self._close(line.stream)
                return False
        own = self._inside(trace, text) if trace.inside else self._after(trace, text, known)
        if own:
            trace.end = self._outside
        else:
            trace.others += 1
            if trace.others > (10 * PATIENCE if trace.inside else PATIENCE):
                self._close(line.stream)
        return own

    def _inside(self, trace: _Trace, text: str) -> bool:
        """A line between a traceback's header and its exception."""
        if found := _FRAME.match(text):
            name = f" in {found['name']}" if found["name"] else ""
            trace.frame = f"{found['file']}:{found['line']}{name}"
            # Where a viewer removed the blanks, code looks like any other line.
            trace.code_follows = not text.startswith(" ")
            return True
        if trace.code_follows or not text or text[0] in " \t" or not text.strip("^~ "):
            trace.code_follows = False
            return True
        if _ERROR.match(text) or _DOTTED.match(text):
            trace.errors.append(text[: 5 * TEXT])
            trace.inside = False
            return True
        return False

    def _after(self, trace: _Trace, text: str, known: Pattern | None) -> bool:
        """A line after an exception: its message or its chain may continue."""
        if not text:
            return True
        if text.startswith(_CHAIN):
            trace.chained = True
            return True
        if trace.group and _ERROR.match(text):
            trace.errors.append(text[: 5 * TEXT])
            return True
        if text[0] in " \t":
            if len(trace.errors[-1]) < 5 * TEXT:
                trace.errors[-1] += " " + text.strip()
            return True
        # A message of several lines that repeats itself.
        return known is not None and known is self._read(trace)[0]

    def _read(self, trace: _Trace) -> tuple[Pattern | None, str]:
        """The cause of a traceback: the exception that comes first in the catalogue."""
        found = [(p, e) for e in trace.errors if (p := self.catalogue.match(e))]
        causes = [(p, e) for p, e in found if not p.consequence]
        return min(causes or found, key=lambda f: self.catalogue.rank[f[0].id], default=(None, ""))

    def _close(self, stream: str) -> None:
        trace = self._open.pop(stream)
        if not trace.errors:
            place = trace.frame or "its header"
            self._add_unknown(
                ("cut", fold(place)),
                trace.first_line,
                f"{_HEADER} ... {place}",
                "a traceback that is cut off or mixed with other output; its exception is missing",
                "look for the exception's line below it, or in the log of another process",
            )
            return
        # A group's own line comes first, its exceptions after it.
        last = trace.errors[0] if trace.group else trace.errors[-1]
        pattern, error = self._read(trace)
        cause = error or (trace.errors[-1] if trace.group else trace.errors[0])
        text = last[:TEXT] if cause == last else f"{last[:TEXT]} (from: {cause[:TEXT]})"
        if pattern:
            self._add_known(pattern, trace.first_line, text)
            return
        key = ("line", fold(last))
        place = f", raised at {trace.frame}" if trace.frame else ""
        meaning = f"an exception that the catalogue does not know{place}"
        advice = "read the lines before it; the frame named is where it was raised"
        self._add_unknown(key, trace.first_line, text, meaning, advice)
        if trace.ignored:
            return
        if key in self._found:
            self._ends[key] = trace.end
        else:
            found = Finding("fatal", None, 1, trace.first_line, text, meaning, advice)
            self._beyond = found, trace.end

    # Findings

    def _add_known(self, pattern: Pattern, number: int, text: str) -> None:
        finding = self._found.get(("id", pattern.id))
        if finding is None:
            self._found["id", pattern.id] = Finding(
                pattern.level,
                pattern.id,
                1,
                number,
                text[: 3 * TEXT],
                pattern.meaning,
                pattern.advice,
                pattern.consequence,
            )
        else:
            finding.count += 1
            finding.first_line = min(finding.first_line, number)

    def _add_unknown(
        self, key: tuple[str, str], number: int, text: str, meaning: str, advice: str
    ) -> None:
        finding = self._found.get(key)
        if finding is not None:
            finding.count += 1
            finding.first_line = min(finding.first_line, number)
        elif len(self._found) < KINDS:
            text = text[: 3 * TEXT]
            self._found[key] = Finding("unknown", None, 1, number, text, meaning, advice)
        elif self._overflow is None:
            note = f"further kinds of messages, more than {KINDS} in all: {text[:TEXT]}"
            self._overflow = Finding("unknown", None, 1, number, note, meaning, advice)
        else:
            self._overflow.count += 1

    def so_far(self) -> list[Finding]:
        """Findings of a log that is still written, in no order, without unfinished tracebacks."""
        return [*self._found.values(), *filter(None, [self._overflow])]

    def finish(self) -> list[Finding]:
        """All findings, the gravest first; mere consequences come after their cause."""
        for stream in list(self._open):
            self._close(stream)
        for key, end in self._ends.items():
            if key in self._found and self._outside - end < LAST_LINES:
                self._found[key].level = "fatal"
        last = []
        if self._beyond is not None and self._outside - self._beyond[1] < LAST_LINES:
            last.append(self._beyond[0])
        return sorted(
            [*self.so_far(), *last],
            key=lambda f: (ORDER.index(f.level), f.consequence, f.first_line),
        )
