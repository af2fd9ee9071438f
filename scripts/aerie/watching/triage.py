"""What the messages of a log mean: a catalogue of known ones, tracebacks, and the unknown rest.

A log is read as a stream in constant memory, whoever wrote it: process prefixes of vLLM and torch,
timestamps, colours and progress bars are taken off each line before it is judged.
"""

import codecs
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from aerie.common.errors import InputError

ORDER = ("fatal", "degraded", "unknown", "hint", "benign")
"""Classes as they are shown. The catalogue has all but `unknown`."""

BLOCK = 1 << 20  # bytes read at a time
LONGEST = 1 << 14  # characters; a longer line is judged in pieces: searches take time by the square
TEXT = 400  # characters kept of a message
KINDS = 2000  # distinct unknown messages told apart; further ones are counted together
STREAMS = 256  # processes whose tracebacks are followed at a time
PATIENCE = 20  # lines after an exception in which its chain may go on
LAST_LINES = 25  # a traceback with fewer other lines after it was the last thing said


_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times faster where it is there


# The catalogue


class Pattern(BaseModel):
    """A known message. The first pattern of the catalogue that fits a line names it."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    id: str = Field(pattern=r"^[a-z0-9_]+$")
    """Short name, unique."""
    level: Literal["benign", "hint", "degraded", "fatal"] = Field(alias="class")
    """`benign`: no effect; `hint`: costs speed or is worth a look; `degraded`: the result may be
    worse than it should be; `fatal`: the job ends."""
    stage: Literal["any", "environment", "start", "engine", "data", "training", "workflow"]
    """Where it appears."""
    pattern: str
    """Regular expression, searched in a line without its prefixes; case matters."""
    meaning: str
    """What it says about the run."""
    advice: str
    """What to do."""
    seen: list[str] = Field(min_length=1)
    """Where it was found: a package's version and file, or the address of a report."""
    test: str
    """A line as it stands in a log."""
    consequence: bool = False
    """It only follows from another failure, which is shown before it."""


class Catalogue:
    """Patterns in their order, ready to search with."""

    def __init__(self, patterns: list[Pattern]):
        self.patterns = patterns
        self.rank = {p.id: i for i, p in enumerate(patterns)}
        self._searches = [
            (text, re.compile(p.pattern), p)
            for p in patterns
            for text in needles(p.pattern) or [""]
        ]

    @classmethod
    def load(cls, path: Path) -> "Catalogue":
        """Read a YAML list of patterns; `InputError` names the entry that is not valid."""
        try:
            entries = yaml.load(path.read_bytes(), Loader=_Loader)
        except (OSError, yaml.YAMLError) as error:
            raise InputError(f"{path}: cannot be read: {error}") from error
        patterns: list[Pattern] = []
        for number, entry in enumerate(entries or [], 1):
            try:
                pattern = Pattern.model_validate(entry)
                re.compile(pattern.pattern)
            except (ValidationError, re.error) as error:
                name = entry.get("id") if isinstance(entry, dict) else None
                raise InputError(f"{path}: entry {number} ({name}): {error}") from None
            if any(p.id == pattern.id for p in patterns):
                raise InputError(f"{path}: entry {number}: the id {pattern.id!r} is there twice")
            patterns.append(pattern)
        return cls(patterns)

    def among(self, block: str) -> list[tuple[str, re.Pattern[str], Pattern]]:
        """The searches that can find something in `block`: a quick look at many lines at once."""
        return [s for s in self._searches if s[0] in block]

    def match(
        self, line: str, among: list[tuple[str, re.Pattern[str], Pattern]] | None = None
    ) -> Pattern | None:
        """The first pattern that fits `line`, a line without its prefixes."""
        for text, search, pattern in self._searches if among is None else among:
            if text in line and search.search(line):
                return pattern
        return None


def needles(pattern: str) -> list[str]:
    """Texts of which every match of `pattern` contains at least one; [] when there are none."""
    return _needles(re._parser.parse(pattern))


def _needles(parsed: Any) -> list[str]:
    sets: list[list[str]] = []
    run = ""
    for operation, value in [*parsed, (None, None)]:
        if str(operation) == "LITERAL":
            run += chr(value)
            continue
        if run:
            sets.append([run])
        run = ""
        if str(operation) == "SUBPATTERN":
            sets.append(_needles(value[3]))
        elif str(operation) == "BRANCH":
            branches = [_needles(branch) for branch in value[1]]
            if all(branches):
                sets.append([text for branch in branches for text in branch])
    # The set whose shortest text is longest is the rarest to be found.
    return max(filter(None, sets), key=lambda texts: min(map(len, texts)), default=[])


# Lines

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
# tqdm's bar, as in "Loading:  20%|██  | 1/5 [00:01<00:04,  1.0s/it]"; what comes after it stays.
_BAR = re.compile(r"^[^|\n]{0,100}?\d{1,3}%\|[^|]*\|\s*[^\s\[]+(?:\s*\[[^\]]*\])?")
_LEVEL = "DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL"
_PREFIX = re.compile(
    rf"""\s*(?:
      \((?P<process>[A-Za-z][^()\n]{{0,60}}?\ ?pid=\d+[^()\n]{{0,40}})\)     # (EngineCore pid=7)
    | \[(?P<rank>rank\s?\d+|default\d+)\]:?                                  # torch, torchrun
    | \[?\d{{4}}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?  # a time
    | \[\d\d:\d\d:\d\d\]                                                     # rich's time
    | (?P<service>[\w.-]{{1,60}})\s+\|(?=\s)                                 # docker compose
    | (?P<level>{_LEVEL})\b(?:\s+\d\d-\d\d\ \d\d:\d\d:\d\d(?:\.\d+)?\s+\[[^\]]+\]|:)?  # vLLM
    | \|\s*(?P<loguru>{_LEVEL})\s*\|\s*\S+:\S+:\d+\s-                        # loguru
    | \[?(?P<glog>[IWEF])\d{{3,4}}\ \d\d:\d\d:\d\d[.\d]*\ [^\]\n]{{0,120}}\] # torch's C++ side
    )""",
    re.VERBOSE,
)
_GLOG = re.compile(r"[WEF]\d{3,4} \d\d:\d\d:\d\d\.")
_GLOG_LEVELS = {"I": "INFO", "W": "WARNING", "E": "ERROR", "F": "FATAL"}
# A line without any of these words cannot say that something is wrong (but for the catalogue's).
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
class Line:
    """A line without colours, progress bar and prefixes.

    `stream`: who wrote it, so that tracebacks of several processes are told apart.
    """

    text: str
    stream: str
    level: str | None


def clean(raw: str) -> Line:
    """Take off what stands before a message."""
    text = _ANSI.sub("", raw) if "\x1b" in raw else raw
    if "%|" in text:
        text = _BAR.sub("", text)
    who: list[str] = []
    level = None
    while found := _PREFIX.match(text):
        named = found.groupdict()
        who += [v for k in ("process", "rank", "service") if (v := named[k])]
        level = named["level"] or named["loguru"] or _GLOG_LEVELS.get(named["glog"]) or level
        text = text[found.end() :].removeprefix(" ")
    if level:
        # The same process may log a traceback and then die of it with another one.
        who.append("logged")
    return Line(text.rstrip(), " ".join(who), level)


def fold(text: str) -> str:
    """A message with paths and numbers taken out, to group those that differ only in them."""
    text = text[: 2 * TEXT]
    text = re.sub(r"(?:[A-Za-z]:|~)?(?:[/\\][\w.@+~-]+){2,}[/\\]?", "PATH", text)
    text = re.sub(r"\b(?:0x)?(?=[a-f]*\d)[0-9a-f]{8,}\b", "#", text)
    return re.sub(r"\d+(?:[.,]\d+)*", "#", text)


# Findings


@dataclass
class Finding:
    """A message or traceback with what it means.

    `first_line` counts from 1. `id` is None for what the catalogue does not know; then `level` is
    `unknown`, or `fatal` for a traceback that was the last thing said.
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
    """A traceback that is being read."""

    first_line: int
    group: bool
    ignored: bool
    errors: list[str] = field(default_factory=list)
    frame: str = ""
    inside: bool = True  # between header and exception
    code_follows: bool = False
    chained: bool = False
    others: int = 0  # lines since, that are not its own
    end: int = 0  # lines outside of tracebacks that came before its last one


class Triage:
    """Judges the lines of one log, block by block."""

    def __init__(self, catalogue: Catalogue):
        self.catalogue = catalogue
        self.lines = 0
        self._found: dict[tuple[str, str], Finding] = {}
        self._open: dict[str, _Trace] = {}
        self._ends: dict[tuple[str, str], int] = {}  # of tracebacks not in the catalogue
        self._ignored: dict[str, int] = {}
        self._outside = 0
        self._overflow: Finding | None = None
        self._beyond: tuple[Finding, int] | None = None  # the last of those that overflow, its end

    def feed(self, block: str) -> None:
        """Take the next lines."""
        among = self.catalogue.among(block)
        glog = _GLOG.search(block) is not None
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
            if self._open or any(q in line for q in quick) or (glog and _GLOG.search(line)):
                for part in line.split("\r"):
                    for start in range(0, len(part) or 1, LONGEST):
                        self._take(part[start : start + LONGEST], number, among)
            else:
                self._outside += 1
        self.lines += ends

    def _take(self, raw: str, number: int, among: list[Any]) -> None:
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
            # Where a viewer took the blanks away, code looks like any other line.
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
        """A line after an exception: its message may go on, or its chain."""
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
        # A message of several lines that says the same thing twice.
        return known is not None and known is self._read(trace)[0]

    def _read(self, trace: _Trace) -> tuple[Pattern | None, str]:
        """What is behind a traceback: of its exceptions the one that the catalogue knows best."""
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
        # The group's own line comes first, its exceptions after it.
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
        """Findings of a log that goes on, in no order; without a traceback that has not ended."""
        return [*self._found.values(), *filter(None, [self._overflow])]

    def finish(self) -> list[Finding]:
        """All findings, the gravest first; what only follows from another comes after it."""
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


# Files

_PACKED = {b"\x1f\x8b": "gunzip", b"\x28\xb5\x2f\xfd": "zstd -d", b"\xfd7zXZ": "unxz"}
_CONTROLS = bytes(b for b in range(32) if b not in b"\t\n\r\x1b\x08\x0c\x00")


def triage(
    file: BinaryIO,
    name: str,
    catalogue: Catalogue,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> list[Finding]:
    """Findings of a log, see `Triage.finish`; `on_bytes` is told how many bytes were read.

    Bytes that are not UTF-8 are replaced. Raises `InputError` for a packed or binary file.
    """
    judge = Triage(catalogue)
    for block in _blocks(file, name, on_bytes):
        judge.feed(block)
    return judge.finish()


def _blocks(file: BinaryIO, name: str, on_bytes: Callable[[int], None]) -> Iterator[str]:
    """Text in blocks of about `BLOCK` characters, cut where a line or a very long piece ends."""
    data = file.read(BLOCK)
    for magic, command in _PACKED.items():
        if data.startswith(magic):
            raise InputError(f"{name}: is compressed; unpack it first ({command})")
    wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    if not wide:
        # A log that was cut while it was written begins with zeros; those alone do not count.
        text = data.replace(b"\0", b"")[:LONGEST]
        odd = len(text) - len(text.translate(None, _CONTROLS))
        if data and (not text or odd > 0.02 * len(text)):
            raise InputError(f"{name}: holds binary data; expected the text of a log")
    decoder = codecs.getincrementaldecoder("utf-16" if wide else "utf-8-sig")("replace")
    rest = ""
    while True:
        text = rest + decoder.decode(data, final=not data).replace("\0", "")
        on_bytes(len(data))
        cut = text.rfind("\n") + 1
        if not data:
            if text:
                yield text
            return
        if len(text) - cut > LONGEST:
            # A bar that was drawn for hours is one line, without an end in sight.
            cut = text.rfind("\r") + 1 or len(text)
        if cut:
            yield text[:cut]
        rest = text[cut:]
        data = file.read(BLOCK)
