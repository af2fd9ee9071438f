"""How the report's plots look."""

import html
from typing import Any

import plotly.graph_objects as go

COLOURS = ("#2b6ca3", "#c8752d", "#3f8f6b", "#8a63ad", "#b5485d", "#7a7f36", "#3d8fa1", "#6b7280")
INK, QUIET, GRID, PALE = "#1f2933", "#5f6b7a", "#e6e9ed", "#c3cbd4"
FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'


def label(text: Any) -> str:
    """Text for a plot: Plotly takes some of HTML's elements in it, which are not wanted here."""
    return html.escape(str(text), quote=False)


def style(figure: go.Figure, height: int, **layout: Any) -> go.Figure:
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


def colour_of(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def faded(colour: str, opacity: float = 0.35) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"


def bars_across(height_each: int, rows: int) -> int:
    return 90 + height_each * rows
