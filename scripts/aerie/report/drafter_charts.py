"""Plots of the drafters side by side: training, acceptance, speed."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from aerie.drafter.metrics import MetricsLine
from aerie.report.drafter import TrainedDrafter
from aerie.report.plotting import COLOURS, PALE, QUIET, bars_across, colour_of, faded, label, style

POINTS = 150
"""Points of a training curve; each is the mean of the steps around it."""


def smooth(steps: Sequence[int], values: Iterable[float]) -> tuple[list[float], list[float]]:
    """Steps and values, averaged over equal stretches so that `POINTS` at most are left."""
    pairs = list(zip(steps, values, strict=True))
    stretch = max(1, -(-len(pairs) // POINTS))
    groups = [pairs[i : i + stretch] for i in range(0, len(pairs), stretch)]
    means = [sum(s for s, _ in g) / len(g) for g in groups]
    return means, [sum(v for _, v in g) / len(g) for g in groups]


def _curves(
    figure: go.Figure,
    drafter: TrainedDrafter,
    number: int,
    values: Callable[[MetricsLine], float],
    place: dict[str, Any],
    form: str,
) -> None:
    """A drafter's training curve, pale, and its validation, strong; `values(line)` is drawn."""
    colour = colour_of(number)
    name = label(drafter.name)
    legend = {"showlegend": place.get("col", 1) == 1 and place.get("row", 1) == 1}
    steps, means = smooth([x.step for x in drafter.training], [values(x) for x in drafter.training])
    figure.add_scatter(
        x=steps,
        y=means,
        mode="lines",
        line={"color": faded(colour), "width": 1.5},
        name=f"{name}, training",
        legendgroup=f"{number}-training",
        hovertemplate=f"step %{{x:.0f}}: %{{y:{form}}}<extra>{name}, training</extra>",
        **legend,
        **place,
    )
    figure.add_scatter(
        x=[x.step for x in drafter.validation],
        y=[values(x) for x in drafter.validation],
        mode="lines+markers",
        line={"color": colour, "width": 2},
        marker={"size": 8, "color": colour},
        name=f"{name}, validation",
        legendgroup=f"{number}-validation",
        customdata=[x.epoch + 1 for x in drafter.validation],
        hovertemplate=f"epoch %{{customdata}}: %{{y:{form}}}<extra>{name}, validation</extra>",
        **legend,
        **place,
    )


def loss(drafters: list[TrainedDrafter]) -> go.Figure:
    figure = go.Figure()
    for number, drafter in enumerate(drafters):
        _curves(figure, drafter, number, lambda x: x.loss, {}, ".3f")
    figure.update_xaxes(title_text="step", rangemode="tozero")
    figure.update_yaxes(title_text="loss")
    return style(figure, 320)


def _accuracy_of(step: int) -> Callable[[MetricsLine], float]:
    return lambda line: line.accuracy[step]


def accuracy(drafters: list[TrainedDrafter]) -> go.Figure | None:
    """Cumulative accuracy, a panel for each drafted token (TTT step)."""
    count = max((len(x.accuracy) for d in drafters for x in d.metrics), default=0)
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
        for k in range(len(drafter.metrics[0].accuracy) if drafter.metrics else 0):
            place = {"row": k // columns + 1, "col": k % columns + 1}
            _curves(figure, drafter, number, _accuracy_of(k), place, ".1%")
    figure.update_yaxes(tickformat=".0%", rangemode="tozero")
    figure.update_yaxes(title_text="correct, and all before it", col=1)
    figure.update_xaxes(title_text="step", rangemode="tozero", row=rows)
    height = 100 + 220 * rows
    return style(
        figure,
        height,
        margin={"l": 60, "r": 16, "t": 66, "b": 52},
        legend={"y": 1 + 28 / (height - 110)},
    )


def positions(drafters: list[TrainedDrafter]) -> go.Figure:
    """Acceptance by position as served (bars), validation's accuracy beside it (diamonds)."""
    figure = go.Figure()
    for number, drafter in enumerate(drafters):
        name, colour = label(drafter.name), colour_of(number)
        served = drafter.acceptance.acceptance_per_position
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
                marker={"color": faded(colour, 0.22), "line": {"color": colour, "width": 1}},
                offsetgroup=f"{number}-validation",
                text=[f"{v:.0%}" for v in expected],
                textposition="outside",
                textfont={"color": QUIET},
                cliponaxis=False,
                hovertemplate=f"%{{x}}: %{{y:.1%}}<extra>{name}, validation</extra>",
            )
    figure.update_xaxes(title_text="position in the draft", showgrid=False)
    figure.update_yaxes(title_text="accepted, and all before it", tickformat=".0%")
    return style(figure, 330, barmode="group", bargap=0.3, bargroupgap=0.08)


def prompt_sets(drafters: list[TrainedDrafter]) -> go.Figure:
    """Acceptance length of each prompt set; the bars begin at 1, a verifier without a drafter."""
    figure = go.Figure()
    names = list(dict.fromkeys(n for d in drafters for n in d.acceptance.prompt_sets))
    highest = 1.0
    for number, drafter in enumerate(drafters):
        sets = drafter.acceptance.prompt_sets
        found = [n for n in names if n in sets]
        values = [sets[n].acceptance_length for n in found]
        highest = max([highest, *values])
        figure.add_bar(
            y=[_set_label(n) for n in found],
            x=[v - 1 for v in values],
            base=1,
            orientation="h",
            name=label(drafter.name),
            marker={"color": colour_of(number)},
            text=[f"{v:.2f}" for v in values],
            textposition="outside",
            cliponaxis=False,
            customdata=[[sets[n].prompts, sets[n].num_drafts, v] for n, v in
                        zip(found, values, strict=True)],
            hovertemplate="%{customdata[2]:.3f} on %{customdata[0]:,} prompts, "
            "%{customdata[1]:,} drafts<extra></extra>",
        )  # fmt: skip
    figure.update_xaxes(title_text="acceptance length", range=[1, 1 + 1.15 * (highest - 1 or 1)])
    figure.update_yaxes(autorange="reversed", showgrid=False)
    rows = len(names) * len(drafters)
    return style(figure, bars_across(30, max(rows, 2)), showlegend=len(drafters) > 1)


def _set_label(name: str) -> str:
    return "held-out" if name == "heldout" else label(name)


def speed(drafters: list[TrainedDrafter]) -> go.Figure:
    """Tokens a second and time per output token, without and with, by concurrency."""
    rows = [(d, s) for d in drafters for s in d.speeds]
    places = [
        (f"{label(d.name)}, " if len(drafters) > 1 else "") + f"concurrency {s.concurrency}"
        for d, s in rows
    ]
    figure = make_subplots(
        rows=1, cols=2, shared_yaxes=True, horizontal_spacing=0.06,
        subplot_titles=("tokens a second (more is better)", "ms per output token (less is better)"),
    )  # fmt: skip
    highest = [0.0, 0.0]
    for name, drafted, colour in (
        ("without drafter", False, PALE),
        ("with drafter", True, COLOURS[0]),
    ):
        rates = [s.with_drafter if drafted else s.without for _, s in rows]
        times = [1000 * (s.seconds_with if drafted else s.seconds_without) for _, s in rows]
        notes = [f" ({s.ratio:.2f}×)" if drafted else "" for _, s in rows]
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
    return style(
        figure,
        height,
        margin={"l": 60, "r": 16, "t": 66, "b": 36},
        legend={"y": 1 + 28 / (height - 102), "traceorder": "normal"},
        barmode="group",
        bargroupgap=0.06,
    )
