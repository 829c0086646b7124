"""Figures as SVG, without a plotting library: a machine with a bare environment draws them too.

A figure is a row of panels. A panel has scatter points or lines over linear or logarithmic axes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

# Okabe and Ito's palette, safe for colour-blind readers.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8A8A8A", "#000000")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 420, 340, 62, 12, 34, 64
ROW = 15


@dataclass(frozen=True, kw_only=True)
class Series:
    """Points of one name.

    Args:
        name: For the legend; empty for none.
        x, y: Of equal length. What an axis cannot show, such as 0 on a logarithmic one, is left out.
        line: Whether points are joined, rather than marked.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    line: bool = False


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Axes with series.

    Args:
        title, x_title, y_title: What stands beside it.
        series: What is drawn.
        log_x, log_y: Whether an axis is logarithmic.
        diagonal: Whether to draw the line of equal values.
        labels: What stands at 0, 1, 2, ... of the horizontal axis, in the place of numbers.
    """

    title: str
    x_title: str
    y_title: str
    series: Sequence[Series]
    log_x: bool = False
    log_y: bool = False
    diagonal: bool = False
    labels: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Panels side by side.

    Args:
        panels: From left to right.
        caption: One sentence on what was measured on what.
    """

    panels: Sequence[Panel]
    caption: str = ""


def _value(x: float, log: bool) -> float | None:
    if not math.isfinite(x) or (log and x <= 0):
        return None
    return math.log10(x) if log else x


def _ticks(low: float, high: float, log: bool) -> list[tuple[float, str]]:
    """Return places on an axis, in its own units, with their labels."""
    if log:
        first, last = math.floor(low), math.ceil(high)
        step = max(1, (last - first) // 6)
        return [(float(e), f"1e{e}") for e in range(first, last + 1, step) if low - 1e-9 <= e <= high + 1e-9]
    raw = (high - low) / 8
    base = 10.0 ** math.floor(math.log10(raw))
    step = next(m * base for m in (1, 2, 5, 10) if m * base >= raw)
    first = math.ceil(low / step)
    return [(k * step, f"{k * step:.6g}") for k in range(first, math.floor(high / step) + 1)]


def _limits(values: list[float], log: bool) -> tuple[float, float]:
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if high - low < 1e-12 * max(1.0, abs(high)):
        low, high = low - 0.5, high + 0.5
    room = 0.04 * (high - low)
    return (math.floor(low), math.ceil(high)) if log else (low - room, high + room)


def _panel(panel: Panel, left: float) -> list[str]:
    drawn = []
    for series in panel.series:
        pairs = [(_value(x, panel.log_x), _value(y, panel.log_y)) for x, y in zip(series.x, series.y, strict=True)]
        drawn.append([(x, y) for x, y in pairs if x is not None and y is not None])
    x0, x1 = _limits([x for points in drawn for x, _ in points], panel.log_x)
    y0, y1 = _limits([y for points in drawn for _, y in points], panel.log_y)
    if panel.diagonal:
        x0 = y0 = min(x0, y0)
        x1 = y1 = max(x1, y1)
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        return left + LEFT + (x - x0) / (x1 - x0) * wide, TOP + (y1 - y) / (y1 - y0) * high

    a, b = at(x0, y0), at(x1, y1)
    out = [f'<rect x="{a[0]:.1f}" y="{b[1]:.1f}" width="{wide}" height="{high}" fill="none" stroke="#444"/>']
    out.append(
        f'<text x="{left + LEFT + wide / 2:.1f}" y="20" text-anchor="middle" class="t">{escape(panel.title)}</text>'
    )
    named = [(float(place), label) for place, label in enumerate(panel.labels)]
    for value, label in named or _ticks(x0, x1, panel.log_x):
        x, y = at(value, y0)
        out.append(f'<path d="M{x:.1f} {y:.1f}v-{high}" class="g"/>')
        turned = f'transform="rotate(-25 {x:.1f} {y + 12:.1f})" text-anchor="end"' if named else 'text-anchor="middle"'
        out.append(f'<text x="{x:.1f}" y="{y + 14:.1f}" {turned}>{escape(label)}</text>')
    for value, label in _ticks(y0, y1, panel.log_y):
        x, y = at(x0, value)
        out.append(f'<path d="M{x:.1f} {y:.1f}h{wide}" class="g"/>')
        out.append(f'<text x="{x - 4:.1f}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    out.append(
        f'<text x="{left + LEFT + wide / 2:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{escape(panel.x_title)}</text>'
    )
    middle = TOP + high / 2
    out.append(
        f'<text transform="translate({left + 13:.1f} {middle:.1f}) rotate(-90)" text-anchor="middle">'
        f"{escape(panel.y_title)}</text>"
    )
    if panel.diagonal:
        out.append(f'<path d="M{a[0]:.1f} {a[1]:.1f}L{b[0]:.1f} {b[1]:.1f}" stroke="#999" stroke-dasharray="4 3"/>')
    for number, (series, points) in enumerate(zip(panel.series, drawn, strict=True)):
        colour = COLOURS[number % len(COLOURS)]
        places = [at(x, y) for x, y in points]
        if series.line and places:
            path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
            out.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        if not series.line or len(places) <= 20:
            size = 1.4 if len(places) > 100 else 2.6
            out += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size}" fill="{colour}" opacity=".6"/>' for x, y in places]
    return out


def _legend(figure: Figure) -> list[tuple[str, str]]:
    """Return names with their colours; a series' colour is that of its place in its panel."""
    found: dict[str, str] = {}
    for panel in figure.panels:
        for number, series in enumerate(panel.series):
            if series.name:
                found.setdefault(series.name, COLOURS[number % len(COLOURS)])
    return list(found.items())


def svg(figure: Figure) -> str:
    """Return a figure as the text of an SVG file."""
    legend = _legend(figure)
    columns = max(1, len(figure.panels) * 2)
    rows = -(-len(legend) // columns)
    wide, high = WIDTH * len(figure.panels), HEIGHT + ROW * rows + (ROW + 6 if figure.caption else 0)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" height="{high}">',
        "<style>text{font:11px sans-serif;fill:#222}.t{font-weight:bold}.g{stroke:#e4e4e4;fill:none}</style>",
        f'<rect width="{wide}" height="{high}" fill="white"/>',
    ]
    for number, panel in enumerate(figure.panels):
        out += _panel(panel, number * WIDTH)
    for number, (name, colour) in enumerate(legend):
        x, y = LEFT + (number % columns) * (wide - LEFT) / columns, HEIGHT + ROW * (number // columns) + 9
        out.append(f'<circle cx="{x:.1f}" cy="{y - 4:.1f}" r="4" fill="{colour}"/>')
        out.append(f'<text x="{x + 8:.1f}" y="{y:.1f}">{escape(name)}</text>')
    if figure.caption:
        out.append(f'<text x="{LEFT}" y="{high - 8}" fill="#555">{escape(figure.caption)}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"
