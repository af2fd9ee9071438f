"""The catalogue of known log messages, `config/log_patterns.yaml`."""

import re
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from aerie.common.errors import InputError

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C loader is ten times faster


class Pattern(BaseModel):
    """A known message. The first pattern of the catalogue that matches a line applies."""

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
    """A mere consequence of another failure, which is shown before it."""


Search = tuple[str, re.Pattern[str], Pattern]
"""A text that every match contains, the compiled pattern, and what it belongs to."""


class Catalogue:
    """Patterns in their order, ready for searches."""

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
                raise InputError(f"{path}: entry {number}: the id {pattern.id!r} appears twice")
            patterns.append(pattern)
        return cls(patterns)

    def among(self, block: str) -> list[Search]:
        """The searches that may match in `block`: a quick check of many lines at once."""
        return [s for s in self._searches if s[0] in block]

    def match(self, line: str, among: list[Search] | None = None) -> Pattern | None:
        """The first pattern that matches `line`, a line without its prefixes."""
        for text, search, pattern in self._searches if among is None else among:
            if text in line and search.search(line):
                return pattern
        return None


def needles(pattern: str) -> list[str]:
    """Texts of which every match of `pattern` contains at least one; [] when none is known."""
    return _needles(re._parser.parse(pattern))  # type: ignore[attr-defined]


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
    # The set whose shortest text is longest matches most rarely.
    return max(filter(None, sets), key=lambda texts: min(map(len, texts)), default=[])
