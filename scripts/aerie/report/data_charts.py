"""Plots of the data: what is left after each stage, lengths, coverage, stored states, time."""

import itertools

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from aerie.common.formatting import as_bytes, as_duration
from aerie.report.derived import counts_by_stage, describe_states
from aerie.report.plotting import COLOURS, PALE, QUIET, bars_across, label, style
from aerie.report.run import SPLITS, Run


def counts(run: Run) -> go.Figure:
    """Records or samples after each stage, divided into training and held-out where known."""
    stages = counts_by_stage(run)
    labels = [label(s.label) for s in stages]
    figure = go.Figure()
    for key, name, colour in (
        ("train", SPLITS["train"], COLOURS[0]),
        ("heldout", SPLITS["heldout"], COLOURS[1]),
        ("undivided", "not divided yet", PALE),
    ):
        values = [getattr(s, key) or None for s in stages]
        figure.add_bar(
            y=labels,
            x=values,
            orientation="h",
            name=name,
            marker={"color": colour},
            hovertemplate="%{y}, " + name + ": %{x:,}<extra></extra>",
        )
    totals = [s.total for s in stages]
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
    return style(
        figure,
        bars_across(34, len(stages)),
        barmode="stack",
        legend={"traceorder": "normal"},
        yaxis={"autorange": "reversed", "showgrid": False},
        xaxis={"range": [0, 1.1 * max(1, *totals)], "tickformat": ","},
    )


def lengths(run: Run) -> go.Figure | None:
    """Lengths of the samples, one panel a split, with the median and the 90th percentile."""
    splits = {"train": run.samples.train, "heldout": run.samples.heldout}
    found = {s: summary for s, summary in splits.items() if summary.lengths}
    if not found:
        return None
    figure = make_subplots(
        rows=len(found), cols=1, shared_xaxes=True, vertical_spacing=0.16,
        subplot_titles=[f"{SPLITS[s]}, {x.samples:,} samples" for s, x in found.items()],
    )  # fmt: skip
    for row, summary in enumerate(found.values(), 1):
        edges, values = summary.length_edges, summary.lengths
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
            if name in summary.length:
                figure.add_vline(
                    x=summary.length[name],
                    line={"color": QUIET, "width": 1, "dash": "dot"},
                    annotation={"text": f"{text} {summary.length[name]:.0f}", "yanchor": "top"},
                    row=row,
                    col=1,
                )
    figure.update_yaxes(title_text="samples")
    figure.update_xaxes(title_text="tokens a sample", row=len(found), col=1)
    return style(figure, 80 + 150 * len(found), bargap=0)


def coverage(run: Run) -> go.Figure | None:
    """Share of target tokens within a draft vocabulary, by its size; the drafters' own marked."""
    if not run.coverage:
        return None
    points = {
        int(size): share
        for found in run.coverage.values()
        for size, share in found.coverage.items()
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
        names = ", ".join(d.name for d in run.drafters if d.vocabulary == size)
        figure.add_scatter(
            x=[size],
            y=[found.covered],
            mode="markers+text",
            marker={"size": 11, "color": COLOURS[0]},
            text=[f"{label(names)}: {found.covered:.1%}"],
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
    return style(figure, 380)


def stored_bytes(run: Run) -> go.Figure | None:
    """Bytes of the states as computed and as stored."""
    states = describe_states(run)
    if not states.raw_bytes:
        return None
    values = [states.raw_bytes, states.bytes]
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
    return style(figure, 150, margin={"l": 60, "r": 16, "t": 10, "b": 10})


def origin(run: Run) -> go.Figure | None:
    """Where the tokens with states came from in the last run of the stages."""
    states = describe_states(run)
    if not states.tokens:
        return None
    parts = (
        ("captured while answering", states.captured_tokens, COLOURS[2]),
        ("extracted afterwards", states.extracted_tokens, COLOURS[0]),
        ("kept from before, or copied", states.kept_tokens, PALE),
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
    return style(figure, 150, margin={"l": 60, "r": 16, "t": 10, "b": 10})


def _job(stage: str, part: str) -> str:
    lane = "lane " if stage == "extract_hidden_states" else ""
    return label(f"{stage} {lane}{part}".rstrip())


def durations(run: Run) -> go.Figure | None:
    """How long the last run of each job took."""
    if not run.durations:
        return None
    seconds = [d.seconds for d in run.durations]
    memory = [
        "" if d.memory_mb is None else f", at most {d.memory_mb / 1024:.2f} GiB of memory"
        for d in run.durations
    ]
    figure = go.Figure()
    figure.add_bar(
        y=[_job(d.stage, d.part) for d in run.durations],
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
    return style(figure, bars_across(28, len(seconds)), margin={"l": 60, "r": 16, "t": 10, "b": 44})
