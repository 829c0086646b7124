"""Shared parts of all plots: palette, traces, log axes, and the Plotly JSON that the page draws."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mismatch_ext.errors import PeerVersionError
from mismatch_ext.report.text import quantity

# Okabe and Ito's palette, safe for colour-blind readers.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8A8A8A")
MARKERS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star")
GLYPHS = ("●", "■", "◆", "▲", "✚", "✖", "★")
DASHES = ("dot", "dash", "dashdot", "longdash")
# A log axis shows at most this many decades below its largest value.
MAX_DECADES = 12


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One plot: its place in the page, its Plotly JSON, and one sentence on how to read it."""

    id: str
    title: str
    caption: str
    json: str


def require_plotly() -> Any:
    """Import plotly, or say how to install it."""
    try:
        import plotly.graph_objects
        import plotly.offline
    except ImportError as error:
        raise PeerVersionError(
            "the report needs plotly, which is not installed; run `pip install mismatch-ext[report]`."
        ) from error
    return plotly


def style(index: int) -> dict[str, str]:
    """Return the colour and Plotly marker of the run at an index, and a character of the marker's shape."""
    look = index % len(PALETTE)
    return {"color": PALETTE[look], "marker": MARKERS[look], "glyph": GLYPHS[look]}


def drawable(value: float | None, log: bool) -> bool:
    return value is not None and (value > 0 or not log)


def trace_of(
    name: str, index: int, x: Sequence[Any], y: Sequence[Any], *, split: str = "train", order: int = 0
) -> dict[str, Any]:
    look, evaluation = style(index), split != "train"
    label = f"{name}, {split}" if evaluation else name
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "x": list(x),
        "y": list(y),
        # Plotly reads names as markup.
        "name": html.escape(label),
        "meta": {"run": index},
        "line": {
            "color": look["color"],
            "width": 2,
            "dash": DASHES[(order - 1) % 4] if evaluation else "solid",
        },
        "marker": {
            "symbol": look["marker"] + ("-open" if evaluation else ""),
            "size": 8 if evaluation else 5,
        },
        "hovertemplate": "%{y:.3~g}<extra>%{fullData.name}</extra>",
    }


def log_axis(traces: Sequence[Mapping[str, Any]], title: str) -> dict[str, Any]:
    values = [value for trace in traces for value in trace["y"] if value is not None and value > 0]
    if not values:
        return {"title": title}
    top = math.log10(max(values))
    bottom = max(math.log10(min(values)), top - MAX_DECADES)
    margin = max(0.08 * (top - bottom), 0.15)
    axis: dict[str, Any] = {"title": title, "type": "log", "range": [bottom - margin, top + margin]}
    if top - bottom > 1.5:
        # Smaller font, because Plotly draws powers larger than other tick labels.
        look = {"exponentformat": "power", "tickfont": {"size": 10}, "dtick": math.ceil((top - bottom) / 8)}
        return axis | look
    decades = range(max(-307, math.floor(bottom - margin)), min(307, math.ceil(top + margin)) + 1)
    ticks = [digit * 10.0**decade for decade in decades for digit in (1, 2, 5)]
    return axis | {"tickvals": ticks, "ticktext": [quantity(tick, 1) for tick in ticks]}


def present(*figures: Figure | None) -> tuple[Figure, ...]:
    return tuple(figure for figure in figures if figure is not None)


def figure_of(
    id: str,
    title: str,
    caption: str,
    traces: Sequence[dict[str, Any]],
    x: dict[str, Any],
    y: dict[str, Any],
    *,
    unified: bool = False,
    shapes: Sequence[dict[str, Any]] = (),
) -> Figure | None:
    if not traces:
        return None
    plotly = require_plotly()
    common = {"zeroline": False, "automargin": True, "ticks": "outside", "ticklen": 4}
    figure = plotly.graph_objects.Figure(
        data=list(traces),
        layout={
            "margin": {"l": 60, "r": 16, "t": 22, "b": 48},
            "showlegend": False,
            "hovermode": "x unified" if unified else "closest",
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "template": "none",
            "xaxis": {**common, **x, "title": {"text": x["title"]}},
            "yaxis": {**common, **y, "title": {"text": y["title"]}},
            "shapes": list(shapes),
        },
    )
    data = json.dumps(figure.to_plotly_json(), allow_nan=False, default=list)
    # The JSON stands in a script element, which only "<" could end; JSON allows "<" as an escape.
    return Figure(id=id, title=title, caption=caption, json=data.replace("<", "\\u003c"))
