"""A run's status as people and programs look at it: a page in the terminal, the same as HTML, and
figures for Prometheus."""

import html
import io
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from aerie.common.formatting import as_duration
from aerie.watching.status import BROKEN, STATES, Job, RunStatus, clock, number, state_of

PAGE_WIDTH = 110  # columns of the HTML page
NARROW = 72  # columns, under which what is known of a stage stands below its name
PARTS = 8  # parts of a stage that are listed each
POINTS = 24  # of a sparkline
BARS = "▁▂▃▄▅▆▇█"
SIGNS = {
    "not started": ("·", "dim"),
    "waiting": ("○", ""),
    "running": ("▶", "bold cyan"),
    "done": ("✓", "green"),
    "failed": ("✗", "bold red"),
    "stalled": ("✗", "bold red"),
    "stopped": ("✗", "bold red"),
    "dead": ("✗", "bold red"),
    "no sign": ("?", "bold yellow"),
    "out of reach": ("–", "yellow"),
}
WARNING_STYLES = {"fatal": "bold red", "degraded": "yellow", "unknown": "magenta", "hint": "cyan"}


# The page


def draw(status: RunStatus, short: bool = False) -> RenderableType:
    """The page for a terminal of any width. `short`: one line for each stage or part of it."""
    parts: list[RenderableType] = [_head(status), _Stages(status, short)]
    running = [j for j in status.jobs if j.state in ("running", "no sign")]
    broken = [j for j in status.jobs if j.state in BROKEN]
    if broken:
        parts += ["", Rule("what went wrong", style="red", align="left"), *map(_broken, broken)]
    if running:
        parts += ["", Rule("running", style="cyan", align="left"), *map(_running, running)]
    return Group(*parts, "", _foot(status))


def _head(status: RunStatus) -> Text:
    head = Text()
    head.append(status.run, "bold")
    sign, style = SIGNS[status.state]
    head.append(f"  {sign} {status.state}", style)
    if status.began:
        head.append(f"  started {clock(status.began)}", "dim")
    head.append(f"  seen {clock(status.time)}\n", "dim")
    return head


class _Stages:
    """The way of the data, as wide as there is room."""

    def __init__(self, status: RunStatus, short: bool):
        self.status, self.short = status, short

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # What is cut is the last column; Rich would take from all of those that do not wrap alike.
        last: dict[str, Any] = {"overflow": "fold"}
        if self.short:
            last = {"overflow": "ellipsis", "no_wrap": True, "ratio": 1}
        table = Table(
            box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 0), expand=self.short
        )
        table.add_column(no_wrap=True)
        if options.max_width < NARROW:
            table.add_column(**last)
            for sign, title, _, text in _rows(self.status):
                table.add_row(sign, Text("  " if self.short else "\n  ").join([title, text]))
        else:
            table.add_column(no_wrap=True)
            table.add_column(no_wrap=True, max_width=12)
            table.add_column(**last)
            for row in _rows(self.status):
                table.add_row(*row)
        yield table


def _rows(status: RunStatus) -> Iterator[tuple[Text, Text, RenderableType, Text]]:
    """Sign, name, bar and words of each stage and its parts."""
    for stage, jobs in status.stages():
        if len(jobs) == 1:
            yield _row(jobs[0], stage if jobs[0].part == "run" else jobs[0].name)
            continue
        state = state_of(jobs)
        sign, style = SIGNS[state]
        counts = ((sum(j.state == s for j in jobs), s) for s in STATES)
        words = ", ".join(f"{n} {s}" for n, s in counts if n)
        yield Text(sign, style), Text(stage), _bar(_sum(jobs)), Text(words, style)
        listed = [j for j in jobs if j.state not in ("not started", "waiting", "done")]
        for job in jobs if len(jobs) <= PARTS else listed:
            yield _row(job, f"  {job.part}")


def _row(job: Job, title: str) -> tuple[Text, Text, RenderableType, Text]:
    sign, style = SIGNS[job.state]
    if job.earlier:
        style = "dim"
    text = Text(job.state, style)
    if job.state == "done":
        took = "" if job.seconds is None else f" in {as_duration(job.seconds)}"
        text = Text(f"done{' earlier' * job.earlier}{took}", style)
        details = [job.result, job.note]
    elif job.state in ("running", "no sign"):
        details = [job.phase if job.phase != "working" else "", _pace(job)]
    elif job.state in BROKEN:
        details = [job.reason.split("\n")[0] or job.note]
    else:
        details = [job.note]
    words = "; ".join(d for d in details if d)
    text.append(f"; {words}" if words else "", "dim" if job.earlier else "default")
    return Text(sign, style), Text(title, "" if job.state in BROKEN else style), _bar(job), text


def _pace(job: Job) -> str:
    """How far it is, how long it will take, and how fast; a narrow page cuts the end."""
    if job.done is None:
        return ""
    words = f"{job.done:,.0f}" + (f"/{job.total:,.0f}" if job.total else "") + f" {job.unit}"
    if job.remaining_seconds is not None:
        words += f", {as_duration(job.remaining_seconds)} left"
    if job.rate:
        words += f", {job.rate:,.1f}/s" if job.rate >= 1 else f", {1 / job.rate:,.1f} s each"
    return words


def _sum(jobs: list[Job]) -> Job:
    """Several jobs as one, as far as a bar shows: finished ones of all, and parts of the others."""
    shares = [1.0 if j.state == "done" else share(j) or 0.0 for j in jobs]
    return Job("", "", [], [], state=state_of(jobs), done=sum(shares), total=len(jobs))


def share(job: Job) -> float | None:
    """How much of it is done, 0 to 1; None when unknown."""
    if job.state == "done":
        return 1.0
    if job.done is None or not job.total:
        return None
    return min(max(job.done / job.total, 0.0), 1.0)


def _bar(job: Job) -> RenderableType:
    known = share(job)
    if known is None or job.state in ("not started", "waiting", "out of reach"):
        return Text("")
    style = "green" if job.state == "done" else SIGNS[job.state][1].removeprefix("bold ") or "cyan"
    return ProgressBar(1.0, known, width=10, complete_style=style, finished_style=style)


def _running(job: Job) -> RenderableType:
    text = Text(job.name, "bold")
    text.append(f"  {job.note}\n" if job.note else "\n", "bold yellow")
    where = [f"on {job.host}, process {job.pid}" if job.host else ""]
    where.append(f"for {as_duration(job.seconds)}" if job.seconds is not None else "")
    where.append(f"{job.cores_busy:.1f} cores busy" if job.cores_busy is not None else "")
    where.append(f"{job.memory_gib:.1f} GiB" if job.memory_gib is not None else "")
    where.append(f"disk {job.disk_free_gib:,.1f} GiB free" if job.disk_free_gib is not None else "")
    text.append(", ".join(w for w in where if w) + "\n" if any(where) else "")
    for gpu in job.gpus:
        text.append(_gpu(gpu) + "\n")
    if not job.gpus and job.gpus_missing:
        text.append(f"no GPU figures: {job.gpus_missing}\n", "dim")
    if job.last_progress and job.updated:
        idle = max(job.updated - job.last_progress, 0)
        text.append(f"last progress {as_duration(idle)} before its last sign")
        if job.stall_after_seconds:
            text.append(f", stalled after {as_duration(job.stall_after_seconds)}")
        text.append("\n")
    if job.losses:
        text.append(f"loss {job.losses[-1]:.3f}  ")
        text.append(sparkline(job.losses), "cyan")
    if job.accuracies:
        text.append(f"   tokens a step expected {1 + job.accuracies[-1]:.2f}  ")
        text.append(sparkline(job.accuracies), "cyan")
    if job.losses or job.accuracies:
        text.append("\n")
    for alert in job.alerts[-3:]:
        text.append(f"! {alert}\n", "yellow")
    text.append(f"log {job.log}", "dim")
    return Padding(text, (0, 0, 0, 2))


def _gpu(gpu: dict[str, Any]) -> str:
    def figure(key: str, unit: str, of: str = "") -> str:
        value, limit = number(gpu.get(key)), number(gpu.get(of))
        if value is None:
            return f"{unit} unknown"
        return f"{value:,.0f}" + (f" of {limit:,.0f}" if limit is not None else "") + f" {unit}"

    return (
        f"GPU {gpu.get('index')} {gpu.get('name') or ''}: {figure('use_percent', '% use')}, "
        f"{figure('memory_gib', 'GiB', 'memory_total_gib')}, "
        f"{figure('power_w', 'W', 'power_limit_w')}"
    )


def _broken(job: Job) -> RenderableType:
    text = Text(job.name, "bold red")
    text.append(f"  {job.state}", "red")
    text.append(f" at {clock(job.ended)}" if job.ended else "")
    text.append(f" on {job.host}" if job.host else "")
    text.append(f", exit status {job.exit}" if job.exit is not None else "")
    for line in (job.note, *job.reason.split("\n")):
        text.append(f"\n{line}" if line else "")
    for alert in job.alerts[-3:]:
        text.append(f"\n! {alert}", "yellow")
    text.append(f"\nlog {job.log}", "bold")
    return Padding(text, (0, 0, 0, 2))


def _foot(status: RunStatus) -> Text:
    text = Text()
    if any((counts := status.warnings()).values()):
        text.append("messages in the logs  ")
        for kind, count in counts.items():
            text.append(f"{kind} {count:,}  ", WARNING_STYLES.get(kind, "yellow"))
        logs = sorted((j for j in status.jobs if any(j.warnings.values())), key=_gravity)
        command = f".venv/bin/python scripts/triage_log.py {logs[-1].log}"
        which = f" (1 of {len(logs)} logs)" if len(logs) > 1 else ""
        text.append(f"what they mean{which}:\n  {command}\n", "dim")
    for disk in status.disks:
        text.append(f"disk of {disk['path']}: {disk['free_gib']:,.1f} of ")
        text.append(f"{disk['total_gib']:,.1f} GiB free\n")
    for line in status.unreadable:
        text.append(f"cannot be read: {line}\n", "yellow")
    if status.known_from.startswith("the"):
        text.append(f"jobs known from {status.known_from}\n", "dim")
    if status.state == "done":
        text.append(f"report {status.folder}/report.html\n")
    text.rstrip()
    return text


def _gravity(job: Job) -> list[int]:
    """Sorts jobs by the messages in their logs, those with the most of the gravest class last."""
    return [*(job.warnings.get(k, 0) for k in WARNING_STYLES), sum(job.warnings.values())]


def sparkline(values: list[float]) -> str:
    """The values, oldest first, as one line of bars; each bar the mean of its share of them."""
    count = min(len(values), POINTS)
    cuts = [round(i * len(values) / count) for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(cuts)]
    low, span = min(means), max(means) - min(means)
    return "".join(BARS[round((m - low) / span * 7) if span else 0] for m in means)


# HTML

HTML = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="refresh" content="{seconds:.0f}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ background: #ffffff; color: #000000; margin: 1.5em; }}
pre {{ font: 14px/1.35 Menlo, "DejaVu Sans Mono", Consolas, monospace; }}
</style>
</head>
<body>
<pre>{code}</pre>
</body>
</html>
"""


def as_html(status: RunStatus, refresh_seconds: float) -> str:
    """The page as HTML that needs nothing else and has the browser load it again."""
    console = Console(
        record=True, width=PAGE_WIDTH, file=io.StringIO(), force_terminal=True, highlight=False
    )
    console.print(draw(status))
    code = console.export_html(code_format="{code}", inline_styles=True)
    running = [f"{j.name} {share(j) or 0:.0%}" for j in status.jobs if j.state == "running"]
    title = html.escape(f"{status.run}: {', '.join(running) or status.state}")
    return HTML.format(seconds=max(refresh_seconds, 1), title=title, code=code)


# Prometheus


def as_prometheus(status: RunStatus) -> str:
    """The figures in the text format of node-exporter's textfile collector."""
    lines: list[str] = []
    run = {"run": status.run}

    def family(name: str, about: str, samples: Iterable[tuple[dict[str, Any], Any]]) -> None:
        given: dict[str, float] = {}  # a series that is there twice has the whole file refused
        for labels, value in samples:
            if (v := number(value)) is not None:
                given[",".join(f'{k}="{_escape(x)}"' for k, x in {**run, **labels}.items())] = v
        if not given:
            return
        lines.append(f"# HELP aerie_{name} {about}")
        lines.append(f"# TYPE aerie_{name} gauge")
        lines.extend(f"aerie_{name}{{{text}}} {value!r}" for text, value in given.items())

    def of(job: Job, **more: Any) -> dict[str, Any]:
        return {"stage": job.stage, "part": job.part, **more}

    def each(name: str, about: str, key: str, factor: float = 1) -> None:
        values = ((j, getattr(j, key)) for j in status.jobs)
        family(name, about, [(of(j), v * factor) for j, v in values if v is not None])

    jobs = status.jobs
    family("status_timestamp_seconds", "When these figures were gathered.", [({}, status.time)])
    family(
        "run_state",
        "1 for the state that the run is in.",
        [({"state": s}, 1 if s == status.state else 0) for s in STATES],
    )
    family(
        "job_state",
        "1 for the state that a job is in.",
        [(of(j, state=s), 1 if s == j.state else 0) for j in jobs for s in STATES],
    )
    units = [(of(j, unit=j.unit), j) for j in jobs if j.state in ("running", "no sign")]
    family("job_done_units", "Units done by a running job.", [(n, j.done) for n, j in units])
    family("job_units", "Units that a running job has to do.", [(n, j.total) for n, j in units])
    family("job_units_per_second", "Rate of a running job.", [(n, j.rate) for n, j in units])
    each("job_remaining_seconds", "Time that a job still takes.", "remaining_seconds")
    each("job_duration_seconds", "Time that a job took, or runs.", "seconds")
    each("job_heartbeat_timestamp_seconds", "Last sign of a job's supervisor or log.", "updated")
    each("job_progress_timestamp_seconds", "Last progress of a job.", "last_progress")
    each("job_memory_bytes", "Resident memory of a job's processes.", "memory_gib", 2**30)
    each("job_busy_cores", "Processor cores that a job keeps busy.", "cores_busy")
    family("job_loss", "Last training loss.", [(of(j), j.losses[-1]) for j in jobs if j.losses])
    family(
        "job_messages",
        "Messages in a job's log by class.",
        [(of(j, **{"class": k}), n) for j in jobs for k, n in j.warnings.items()],
    )
    gpus = [
        (of(j, host=j.host, gpu=g.get("index")), g)
        for j in jobs
        if j.state == "running"
        for g in j.gpus
    ]
    for name, about, key, factor in (
        ("gpu_use_ratio", "Use of a job's GPU.", "use_percent", 0.01),
        ("gpu_memory_bytes", "Memory used of a job's GPU.", "memory_gib", 2**30),
        ("gpu_power_watts", "Power that a job's GPU takes.", "power_w", 1),
    ):
        known = [(n, v) for n, g in gpus if (v := number(g.get(key))) is not None]
        family(name, about, [(n, v * factor) for n, v in known])
    accepted = [j for j in jobs if j.stage == "measure_acceptance"]
    family(
        "acceptance_length_tokens",
        "Tokens a verifier step, measured.",
        [({"drafter": j.part, "prompt_set": k}, v) for j in accepted for k, v in j.figures.items()],
    )
    timed = [j for j in jobs if j.stage == "measure_speed"]
    family(
        "speedup_ratio",
        "Speed with the drafter by speed without.",
        [({"drafter": j.part, "concurrency": k}, v) for j in timed for k, v in j.figures.items()],
    )
    family(
        "disk_free_bytes",
        "Free space of a disk that the run writes to.",
        [({"path": d["path"]}, d["free_gib"] * 2**30) for d in status.disks],
    )
    family("unreadable_files", "Files that could not be read.", [({}, len(status.unreadable))])
    return "\n".join(lines) + "\n"


def _escape(value: Any) -> str:
    """A label's value, escaped as Prometheus's text format asks for."""
    return str(value).replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
