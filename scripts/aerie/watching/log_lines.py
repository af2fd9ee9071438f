"""A line of a log, whichever program wrote it, without what stands before its message."""

import re
from dataclasses import dataclass

TEXT = 400  # characters kept of a message

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
# tqdm's bar, as in "Loading:  20%|██  | 1/5 [00:01<00:04,  1.0s/it]"; text after it stays.
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
GLOG = re.compile(r"[WEF]\d{3,4} \d\d:\d\d:\d\d\.")
_GLOG_LEVELS = {"I": "INFO", "W": "WARNING", "E": "ERROR", "F": "FATAL"}


@dataclass
class Line:
    """A line without colours, progress bar and prefixes.

    `stream`: who wrote it, which separates the tracebacks of several processes.
    """

    text: str
    stream: str
    level: str | None


def clean(raw: str) -> Line:
    """Remove what stands before a message."""
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
        # A process may log a traceback and then die with another one.
        who.append("logged")
    return Line(text.rstrip(), " ".join(who), level)


def fold(text: str) -> str:
    """A message without paths and numbers, to group those that differ only in them."""
    text = text[: 2 * TEXT]
    text = re.sub(r"(?:[A-Za-z]:|~)?(?:[/\\][\w.@+~-]+){2,}[/\\]?", "PATH", text)
    text = re.sub(r"\b(?:0x)?(?=[a-f]*\d)[0-9a-f]{8,}\b", "#", text)
    return re.sub(r"\d+(?:[.,]\d+)*", "#", text)
