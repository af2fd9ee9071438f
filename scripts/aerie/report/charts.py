"""The report's plots. Each function takes what `report.Run` holds and gives a Plotly figure."""

import html
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from aerie.report.page import (
    SPLITS,
    Drafter,
    Run,
    as_bytes,
    as_duration,
    counts_by_stage,
    describe_states,
)

COLOURS = ("#2b6ca3", "#c8752d", "#3f8f6b", "#8a63ad", "#b5485d", "#7a7f36", "#3d8fa1", "#6b7280")
INK, QUIET, GRID, PALE = "#1f2933", "#5f6b7a", "#e6e9ed", "#c3cbd4"
FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'
POINTS = 150
"""Points that a training curve is drawn with; each is the mean of the steps around it."""


def draw(run: Run) -> dict[str, go.Figure]:
    """All figures of the report by name; one that the run has no data for is left out."""
    figures = {
        "counts": counts(run),
        "lengths": lengths(run),
        "coverage": coverage(run),
        "loss": loss(run.drafters),
        "accuracy": accuracy(run.drafters),
        "positions": positions(run.drafters),
        "prompt_sets": prompt_sets(run.drafters),
        "speed": speed(run.drafters),
        "bytes": stored_bytes(run),
        "origin": origin(run),
        "durations": durations(run),
    }
    return {name: figure for name, figure in figures.items() if figure is not None}


def label(text: Any) -> str:
    """Text for a plot: Plotly takes some of HTML's elements in it, which are not wanted here."""
    return html.escape(str(text), quote=False)


def _style(figure: go.Figure, height: int, **layout: Any) -> go.Figure:
    figure.update_layout(
        template="none",
        height=height,
        margin={"l": 60, "r": 16, "t": 34, "b": 52},
        font={"family": FONT, "size": 13, "color": INK},
        paper_bgcolor="white",
        plot_bgcolor="white",
        hoverlabel={"font": {"family": FONT}},
        legend={
            "orientation": "h",
            "x": 0,
            "xanchor": "left",
            "y": 1.02,
            "yanchor": "bottom",
            "font": {"color": QUIET},
        },
        bargap=0.35,
    )
    axis = {
        "gridcolor": GRID,
        "zeroline": False,
        "linecolor": PALE,
        "tickfont": {"color": QUIET},
        "title_font": {"color": QUIET, "size": 12},
        "automargin": True,
    }
    figure.update_xaxes(**axis)
    figure.update_yaxes(**axis)
    figure.update_annotations(font={"size": 13, "color": QUIET})
    figure.update_layout(**layout)
    return figure


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _faded(colour: str, opacity: float = 0.35) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"


def _bars_across(height_each: int, rows: int) -> int:
    return 90 + height_each * rows


# The way of the data


def counts(run: Run) -> go.Figure:
    """Records or samples after each stage, divided into training and held-out where known."""
    stages = counts_by_stage(run)
    labels = [label(s["label"]) for s in stages]
    figure = go.Figure()
    for key, name, colour in (
        ("train", SPLITS["train"], COLOURS[0]),
        ("heldout", SPLITS["heldout"], COLOURS[1]),
        ("all", "not divided yet", PALE),
    ):
        values = [s.get(key) for s in stages]
        figure.add_bar(
            y=labels,
            x=values,
            orientation="h",
            name=name,
            marker={"color": colour},
            hovertemplate="%{y}, " + name + ": %{x:,}<extra></extra>",
        )
    totals = [sum(s.get(k, 0) for k in ("train", "heldout", "all")) for s in stages]
    figure.add_scatter(
        y=labels,
        x=totals,
        mode="text",
        text=[f" {t:,}" for t in totals],
        textposition="middle right",
        showlegend=False,
        hoverinfo="skip",
        cliponaxis=False,
    )
    return _style(
        figure,
        _bars_across(34, len(stages)),
        barmode="stack",
        legend={"traceorder": "normal"},
        yaxis={"autorange": "reversed", "showgrid": False},
        xaxis={"range": [0, 1.1 * max(1, *totals)], "tickformat": ","},
    )


def lengths(run: Run) -> go.Figure | None:
    """Lengths of the samples, one panel a split, with the median and the 90th percentile."""
    found = {s: run.samples[s] for s in SPLITS if run.samples[s].get("lengths")}
    if not found:
        return None
    figure = make_subplots(
        rows=len(found), cols=1, shared_xaxes=True, vertical_spacing=0.16,
        subplot_titles=[f"{SPLITS[s]}, {x['samples']:,} samples" for s, x in found.items()],
    )  # fmt: skip
    for row, summary in enumerate(found.values(), 1):
        edges, values = summary["length_edges"], summary["lengths"]
        figure.add_bar(
            x=[(a + b) / 2 for a, b in itertools.pairwise(edges)],
            y=values,
            width=[b - a for a, b in itertools.pairwise(edges)],
            marker={"color": COLOURS[row - 1], "line": {"color": "white", "width": 1}},
            customdata=list(itertools.pairwise(edges)),
            hovertemplate="%{customdata[0]:.0f} to %{customdata[1]:.0f} tokens: %{y:,}"
            "<extra></extra>",
            showlegend=False,
            row=row,
            col=1,
        )
        figure.update_yaxes(range=[0, 1.25 * max(values)], row=row, col=1)
        for name, text in (("p50", "median"), ("p90", "90 % under")):
            if name in summary["length"]:
                figure.add_vline(
                    x=summary["length"][name],
                    line={"color": QUIET, "width": 1, "dash": "dot"},
                    annotation={"text": f"{text} {summary['length'][name]:.0f}", "yanchor": "top"},
                    row=row,
                    col=1,
                )
    figure.update_yaxes(title_text="samples")
    figure.update_xaxes(title_text="tokens a sample", row=len(found), col=1)
    return _style(figure, 80 + 150 * len(found), bargap=0)


def coverage(run: Run) -> go.Figure | None:
    """Share of target tokens within a draft vocabulary, by its size; the drafters' own marked."""
    if not run.coverage:
        return None
    points = {
        int(size): share
        for found in run.coverage.values()
        for size, share in found["coverage"].items()
    }
    sizes = sorted(points)
    figure = go.Figure()
    figure.add_scatter(
        x=sizes,
        y=[points[s] for s in sizes],
        mode="lines+markers",
        line={"color": PALE, "width": 2},
        marker={"size": 5, "color": QUIET},
        showlegend=False,
        hovertemplate="%{x:,} tokens: %{y:.2%}<extra></extra>",
    )
    for size, found in run.coverage.items():
        names = ", ".join(d.name for d in run.drafters if d.settings["vocabulary"] == size)
        figure.add_scatter(
            x=[size],
            y=[found["covered"]],
            mode="markers+text",
            marker={"size": 11, "color": COLOURS[0]},
            text=[f"{label(names)}: {found['covered']:.1%}"],
            textposition="bottom right",
            showlegend=False,
            hovertemplate=f"{size:,} tokens: %{{y:.2%}}<extra></extra>",
            cliponaxis=False,
        )
    figure.update_xaxes(
        type="log",
        title_text="draft vocabulary, tokens",
        tickvals=sizes,
        ticktext=[f"{s / 1000:g}k" if s >= 1000 else str(s) for s in sizes],
    )
    low = min(points.values())
    figure.update_yaxes(
        title_text="target tokens covered",
        tickformat=".0%",
        range=[max(0.0, low - 0.15 * (1 - low)), 1.01],
    )
    return _style(figure, 380)


# Training


def smooth(lines: Sequence[dict[str, Any]], values: Iterable[float]) -> tuple[list, list]:
    """Steps and values, averaged over equal stretches so that `POINTS` at most are left."""
    pairs = [(x["step"], v) for x, v in zip(lines, values, strict=True)]
    stretch = max(1, -(-len(pairs) // POINTS))
    groups = [pairs[i : i + stretch] for i in range(0, len(pairs), stretch)]
    steps = [sum(s for s, _ in g) / len(g) for g in groups]
    return steps, [sum(v for _, v in g) / len(g) for g in groups]


def _curves(
    figure: go.Figure, drafter: Drafter, number: int, values: Any, place: dict[str, Any], form: str
) -> None:
    """A drafter's training curve, pale, and its validation, strong; `values(line)` is drawn."""
    colour = _colour(number)
    name = label(drafter.name)
    legend = {"showlegend": place.get("col", 1) == 1 and place.get("row", 1) == 1}
    steps, means = smooth(drafter.training, [values(x) for x in drafter.training])
    figure.add_scatter(
        x=steps,
        y=means,
        mode="lines",
        line={"color": _faded(colour), "width": 1.5},
        name=f"{name}, training",
        legendgroup=f"{number}-training",
        hovertemplate=f"step %{{x:.0f}}: %{{y:{form}}}<extra>{name}, training</extra>",
        **legend,
        **place,
    )
    figure.add_scatter(
        x=[x["step"] for x in drafter.validation],
        y=[values(x) for x in drafter.validation],
        mode="lines+markers",
        line={"color": colour, "width": 2},
        marker={"size": 8, "color": colour},
        name=f"{name}, validation",
        legendgroup=f"{number}-validation",
        customdata=[x["epoch"] + 1 for x in drafter.validation],
        hovertemplate=f"epoch %{{customdata}}: %{{y:{form}}}<extra>{name}, validation</extra>",
        **legend,
        **place,
    )


def loss(drafters: list[Drafter]) -> go.Figure:
    figure = go.Figure()
    for number, drafter in enumerate(drafters):
        _curves(figure, drafter, number, lambda x: x["loss"], {}, ".3f")
    figure.update_xaxes(title_text="step", rangemode="tozero")
    figure.update_yaxes(title_text="loss")
    return _style(figure, 320)


def accuracy(drafters: list[Drafter]) -> go.Figure | None:
    """Cumulative accuracy, a panel for each drafted token (TTT step)."""
    count = max((len(x["accuracy"]) for d in drafters for x in d.metrics), default=0)
    if count == 0:
        return None
    columns = min(count, 4)
    rows = -(-count // columns)
    figure = make_subplots(
        rows=rows, cols=columns, shared_yaxes=True, shared_xaxes=True,
        horizontal_spacing=0.03, vertical_spacing=0.12,
        subplot_titles=[f"drafted token {k + 1}" for k in range(count)],
    )  # fmt: skip
    for number, drafter in enumerate(drafters):
        for k in range(len(drafter.metrics[0]["accuracy"]) if drafter.metrics else 0):
            place = {"row": k // columns + 1, "col": k % columns + 1}
            _curves(figure, drafter, number, lambda x, k=k: x["accuracy"][k], place, ".1%")
    figure.update_yaxes(tickformat=".0%", rangemode="tozero")
    figure.update_yaxes(title_text="foretold, and all before it", col=1)
    figure.update_xaxes(title_text="step", rangemode="tozero", row=rows)
    height = 100 + 220 * rows
    return _style(
        figure,
        height,
        margin={"l": 60, "r": 16, "t": 66, "b": 52},
        legend={"y": 1 + 28 / (height - 110)},
    )


# Evaluation


def positions(drafters: list[Drafter]) -> go.Figure:
    """Acceptance by position as served (bars), validation's accuracy beside it (diamonds)."""
    figure = go.Figure()
    for number, drafter in enumerate(drafters):
        name, colour = label(drafter.name), _colour(number)
        served = drafter.acceptance["acceptance_per_position"]
        figure.add_bar(
            x=[f"token {k}" for k in range(1, len(served) + 1)],
            y=served,
            name=f"{name}, served",
            marker={"color": colour},
            offsetgroup=str(number),
            text=[f"{v:.0%}" for v in served],
            textposition="outside",
            cliponaxis=False,
            hovertemplate=f"%{{x}}: %{{y:.1%}}<extra>{name}, served</extra>",
        )
        if drafter.expectation:
            expected = drafter.expectation.accuracy[: len(served)]
            figure.add_bar(
                x=[f"token {k}" for k in range(1, len(expected) + 1)],
                y=expected,
                name=f"{name}, validation",
                marker={"color": _faded(colour, 0.22), "line": {"color": colour, "width": 1}},
                offsetgroup=f"{number}-validation",
                text=[f"{v:.0%}" for v in expected],
                textposition="outside",
                textfont={"color": QUIET},
                cliponaxis=False,
                hovertemplate=f"%{{x}}: %{{y:.1%}}<extra>{name}, validation</extra>",
            )
    figure.update_xaxes(title_text="position in the draft", showgrid=False)
    figure.update_yaxes(title_text="accepted, and all before it", tickformat=".0%")
    return _style(figure, 330, barmode="group", bargap=0.3, bargroupgap=0.08)


def prompt_sets(drafters: list[Drafter]) -> go.Figure:
    """Acceptance length of each prompt set; the bars begin at 1, a verifier without a drafter."""
    figure = go.Figure()
    names = list(dict.fromkeys(n for d in drafters for n in d.acceptance["prompt_sets"]))
    highest = 1.0
    for number, drafter in enumerate(drafters):
        sets = drafter.acceptance["prompt_sets"]
        found = [n for n in names if n in sets]
        values = [sets[n]["acceptance_length"] for n in found]
        highest = max([highest, *values])
        figure.add_bar(
            y=[_set_label(n) for n in found],
            x=[v - 1 for v in values],
            base=1,
            orientation="h",
            name=label(drafter.name),
            marker={"color": _colour(number)},
            text=[f"{v:.2f}" for v in values],
            textposition="outside",
            cliponaxis=False,
            customdata=[[sets[n].get("prompts", 0), sets[n]["num_drafts"], v] for n, v in
                        zip(found, values, strict=True)],
            hovertemplate="%{customdata[2]:.3f} on %{customdata[0]:,} prompts, "
            "%{customdata[1]:,} drafts<extra></extra>",
        )  # fmt: skip
    figure.update_xaxes(title_text="acceptance length", range=[1, 1 + 1.15 * (highest - 1 or 1)])
    figure.update_yaxes(autorange="reversed", showgrid=False)
    rows = len(names) * len(drafters)
    return _style(figure, _bars_across(30, max(rows, 2)), showlegend=len(drafters) > 1)


def _set_label(name: str) -> str:
    return "held-out" if name == "heldout" else label(name)


def speed(drafters: list[Drafter]) -> go.Figure:
    """Tokens a second and time per output token, without and with, by concurrency."""
    rows = [(d, s) for d in drafters for s in d.speeds]
    places = [
        (f"{label(d.name)}, " if len(drafters) > 1 else "") + f"concurrency {s['concurrency']}"
        for d, s in rows
    ]
    figure = make_subplots(
        rows=1, cols=2, shared_yaxes=True, horizontal_spacing=0.06,
        subplot_titles=("tokens a second (more is better)", "ms per output token (less is better)"),
    )  # fmt: skip
    highest = [0.0, 0.0]
    for name, key, colour in (
        ("without drafter", "without", PALE),
        ("with drafter", "with", COLOURS[0]),
    ):
        rates = [s[key] for _, s in rows]
        times = [1000 * s[f"seconds_{key}"] for _, s in rows]
        notes = [f" ({s['ratio']:.2f}×)" if key == "with" else "" for _, s in rows]
        for column, values in enumerate((rates, times)):
            highest[column] = max(highest[column], *values)
            ends = notes if column == 0 else [""] * len(rows)
            figure.add_bar(
                y=places,
                x=values,
                orientation="h",
                name=name,
                legendgroup=name,
                showlegend=column == 0,
                marker={"color": colour},
                text=[f"{v:.1f}{end}" for v, end in zip(values, ends, strict=True)],
                textposition="outside",
                cliponaxis=False,
                hovertemplate="%{y}: %{x:.1f}<extra>" + name + "</extra>",
                row=1,
                col=column + 1,
            )
    for column, room in ((0, 1.35), (1, 1.2)):
        figure.update_xaxes(range=[0, room * highest[column]], col=column + 1)
    figure.update_yaxes(autorange="reversed", showgrid=False)
    height = 110 + 62 * len(rows)
    return _style(
        figure,
        height,
        margin={"l": 60, "r": 16, "t": 66, "b": 36},
        legend={"y": 1 + 28 / (height - 102), "traceorder": "normal"},
        barmode="group",
        bargroupgap=0.06,
    )


# Hidden states and time


def stored_bytes(run: Run) -> go.Figure | None:
    """Bytes of the states as computed and as stored."""
    states = describe_states(run)
    if not states["raw_bytes"]:
        return None
    values = [states["raw_bytes"], states["bytes"]]
    figure = go.Figure()
    figure.add_bar(
        y=["as computed", "as stored"],
        x=values,
        orientation="h",
        marker={"color": [PALE, COLOURS[0]]},
        text=[as_bytes(v) for v in values],
        textposition="outside",
        cliponaxis=False,
        hovertemplate="%{y}: %{x:,} bytes<extra></extra>",
    )
    figure.update_xaxes(showticklabels=False, showgrid=False, range=[0, 1.25 * max(values)])
    figure.update_yaxes(autorange="reversed", showgrid=False)
    return _style(figure, 150, margin={"l": 60, "r": 16, "t": 10, "b": 10})


def origin(run: Run) -> go.Figure | None:
    """Where the tokens with states came from in the last run of the stages."""
    states = describe_states(run)
    if not states["tokens"]:
        return None
    parts = (
        ("captured while answering", states["captured_tokens"], COLOURS[2]),
        ("extracted afterwards", states["extracted_tokens"], COLOURS[0]),
        ("kept from before, or copied", states["kept_tokens"], PALE),
    )
    figure = go.Figure()
    figure.add_bar(
        y=[name for name, _, _ in parts],
        x=[value for _, value, _ in parts],
        orientation="h",
        marker={"color": [colour for _, _, colour in parts]},
        text=[f"{value:,}" for _, value, _ in parts],
        textposition="outside",
        cliponaxis=False,
        hovertemplate="%{y}: %{x:,} tokens<extra></extra>",
    )
    top = max(value for _, value, _ in parts)
    figure.update_xaxes(showticklabels=False, showgrid=False, range=[0, 1.25 * max(1, top)])
    figure.update_yaxes(autorange="reversed", showgrid=False)
    return _style(figure, 150, margin={"l": 60, "r": 16, "t": 10, "b": 10})


def _job(stage: str, part: str) -> str:
    lane = "lane " if stage == "extract_hidden_states" else ""
    return label(f"{stage} {lane}{part}".rstrip())


def durations(run: Run) -> go.Figure | None:
    """How long the last run of each job took."""
    if not run.durations:
        return None
    seconds = [d["seconds"] for d in run.durations]
    memory = [
        "" if d["memory_mb"] is None else f", at most {d['memory_mb'] / 1024:.2f} GiB of memory"
        for d in run.durations
    ]
    figure = go.Figure()
    figure.add_bar(
        y=[_job(d["stage"], d["part"]) for d in run.durations],
        x=seconds,
        orientation="h",
        marker={"color": COLOURS[0]},
        text=[as_duration(s) for s in seconds],
        textposition="outside",
        cliponaxis=False,
        customdata=list(zip([as_duration(s) for s in seconds], memory, strict=True)),
        hovertemplate="%{y}: %{customdata[0]}%{customdata[1]}<extra></extra>",
    )
    figure.update_xaxes(title_text="seconds", range=[0, 1.18 * max(1, *seconds)])
    figure.update_yaxes(autorange="reversed", showgrid=False)
    return _style(
        figure, _bars_across(28, len(seconds)), margin={"l": 60, "r": 16, "t": 10, "b": 44}
    )
