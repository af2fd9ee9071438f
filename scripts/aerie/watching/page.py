"""A run's status as a page in the terminal, and the same as HTML."""

import html
import io
import itertools
from collections.abc import Iterator
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from aerie.common.formatting import as_duration
from aerie.common.text import clock, printable
from aerie.watching.job_status import GpuFigures
from aerie.watching.run_status import AT_WORK, BROKEN, STATES, JobView, RunStatus, state_of

PAGE_WIDTH = 110  # columns of the HTML page
NARROW = 72  # columns; below, the words about a stage stand under its name
PARTS = 8  # parts of a stage that are all listed
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
    running = [j for j in status.jobs if j.state in AT_WORK]
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
    """The stages in the order of the data, as wide as there is room."""

    def __init__(self, status: RunStatus, short: bool):
        self.status, self.short = status, short

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # Cut the last column only; Rich would take from all columns that do not wrap.
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


def _row(job: JobView, title: str) -> tuple[Text, Text, RenderableType, Text]:
    sign, style = SIGNS[job.state]
    if job.earlier:
        style = "dim"
    text = Text(job.state, style)
    if job.state == "done":
        took = "" if job.seconds is None else f" in {as_duration(job.seconds)}"
        text = Text(f"done{' earlier' * job.earlier}{took}", style)
        details = [job.result, job.note]
    elif job.state in AT_WORK:
        details = [job.phase if job.phase != "working" else "", _pace(job)]
    elif job.state in BROKEN:
        details = [job.reason.split("\n")[0] or job.note]
    else:
        details = [job.note]
    words = "; ".join(d for d in details if d)
    text.append(f"; {words}" if words else "", "dim" if job.earlier else "default")
    return Text(sign, style), Text(title, "" if job.state in BROKEN else style), _bar(job), text


def _pace(job: JobView) -> str:
    """How far it is, the remaining time and the rate; a narrow page cuts the end."""
    if job.done is None:
        return ""
    words = f"{job.done:,.0f}" + (f"/{job.total:,.0f}" if job.total else "") + f" {job.unit or ''}"
    if job.remaining_seconds is not None:
        words += f", {as_duration(job.remaining_seconds)} left"
    if job.rate:
        words += f", {job.rate:,.1f}/s" if job.rate >= 1 else f", {1 / job.rate:,.1f} s each"
    return words


def _sum(jobs: list[JobView]) -> JobView:
    """Several jobs as one for its bar: the finished ones, and parts of the others."""
    done = sum(j.share or 0.0 for j in jobs)
    return JobView(stage="", part="", state=state_of(jobs), done=done, total=len(jobs))


def _bar(job: JobView) -> RenderableType:
    known = job.share
    if known is None or job.state in ("not started", "waiting", "out of reach"):
        return Text("")
    style = "green" if job.state == "done" else SIGNS[job.state][1].removeprefix("bold ") or "cyan"
    return ProgressBar(1.0, known, width=10, complete_style=style, finished_style=style)


def _running(job: JobView) -> RenderableType:
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


def _gpu(gpu: GpuFigures) -> str:
    def figure(value: float | None, unit: str, limit: float | None = None) -> str:
        if value is None:
            return f"{unit} unknown"
        return f"{value:,.0f}" + (f" of {limit:,.0f}" if limit is not None else "") + f" {unit}"

    return (
        f"GPU {gpu.index} {printable(gpu.name or '')}: {figure(gpu.use_percent, '% use')}, "
        f"{figure(gpu.memory_gib, 'GiB', gpu.memory_total_gib)}, "
        f"{figure(gpu.power_w, 'W', gpu.power_limit_w)}"
    )


def _broken(job: JobView) -> RenderableType:
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
        text.append(f"disk of {disk.path}: {disk.free_gib:,.1f} of ")
        text.append(f"{disk.total_gib:,.1f} GiB free\n")
    for line in status.unreadable:
        text.append(f"cannot be read: {line}\n", "yellow")
    if status.note:
        text.append(f"{status.note}\n", "yellow")
    if any(j.stage == "render_report" and j.state == "done" for j in status.jobs):
        text.append(f"report {status.folder}/report.html\n")
    text.rstrip()
    return text


def _gravity(job: JobView) -> list[int]:
    """Sorts jobs by the messages in their logs; most messages of the gravest class come last."""
    return [*(job.warnings.get(k, 0) for k in WARNING_STYLES), sum(job.warnings.values())]


def sparkline(values: list[float]) -> str:
    """The values, oldest first, as one line of bars; each bar is the mean of its share of them."""
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
    """The page as self-contained HTML that the browser reloads."""
    console = Console(
        record=True, width=PAGE_WIDTH, file=io.StringIO(), force_terminal=True, highlight=False
    )
    console.print(draw(status))
    code = console.export_html(code_format="{code}", inline_styles=True)
    running = [f"{j.name} {j.share or 0:.0%}" for j in status.jobs if j.state == "running"]
    title = html.escape(f"{status.run}: {', '.join(running) or status.state}")
    return HTML.format(seconds=max(refresh_seconds, 1), title=title, code=code)
