"""The plots of the report, as the JSON that plotly.js draws.

A run has the same color and marker in every plot. Evaluation splits are dotted and have open markers.
"""

from __future__ import annotations

import html
import json
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from mismatch_ext.errors import PeerVersionError
from mismatch_ext.log_reading import RunData
from mismatch_ext.names import PREFIX, Role
from mismatch_ext.pooling import NATIVE, parts, pooled
from mismatch_ext.report.summary import Pooled, pool_profile

# Okabe and Ito's palette, safe for color-blind readers.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8A8A8A")
MARKERS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star")
GLYPHS = ("●", "■", "◆", "▲", "✚", "✖", "★")
DASHES = ("dot", "dash", "dashdot", "longdash")
MAX_SCATTER_POINTS = 1500
# A longer curve is drawn without markers, which a browser draws one by one.
MAX_MARKERS = 500
ROUTING = PREFIX + "routing/"
MULTIPLIER = PREFIX + "lr_multiplier"
LAYER = re.compile(re.escape(ROUTING) + r"layer_(\d{1,6})_set_mismatch")
STEP = {"title": "optimizer step"}
GAP = "mean |Δlogp| (nat)"
# Gray that can be read on white and on black.
INK, GRID = "#7b838c", "rgba(128,128,128,0.25)"

AXIS = {"zeroline": False, "automargin": True, "ticks": "outside", "gridcolor": GRID, "linecolor": GRID}
CLEAR = "rgba(0,0,0,0)"
LAYOUT: dict[str, Any] = {"paper_bgcolor": CLEAR, "plot_bgcolor": CLEAR}
LAYOUT["margin"] = {"l": 60, "r": 16, "t": 22, "b": 48}
LAYOUT["legend"] = {"orientation": "h", "y": 1.02, "yanchor": "bottom"}
LAYOUT["modebar"] = {"bgcolor": CLEAR, "color": INK, "activecolor": INK}
LAYOUT["font"] = {"size": 12, "color": INK}

Runs = Mapping[str, RunData]
Trace = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One plot: its place in the page, its Plotly JSON, and one sentence on how to read it."""

    id: str
    title: str
    caption: str
    json: str


@dataclass(frozen=True, kw_only=True)
class Section:
    """A heading with figures below it."""

    id: str
    title: str
    figures: tuple[Figure, ...]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A plot of one metric over the steps, by its name in a log or by role."""

    id: str
    metric: str
    title: str
    unit: str
    log: bool
    caption: str


def _read_curves() -> dict[str, list[Curve]]:
    """Read the curves of each section of the report."""
    text = Path(__file__).with_name("curves.toml").read_text(encoding="utf-8")
    return {section: [_curve(**entry) for entry in entries] for section, entries in tomllib.loads(text).items()}


def _curve(*, metric: str = "", role: str = "", **entry: Any) -> Curve:
    return Curve(metric=Role(role) if role else PREFIX + metric, **entry)


CURVES = _read_curves()
TITLES = {
    "gap": "Gap over steps",
    "drift": "Numerics and drift",
    "kl": "KL and effective sample size",
    "training": "Reward, length and loss",
    "routing": "Routing replay",
    "learning-rate": "Learning-rate control",
    "loss-scale": "Loss scale",
    "weight-sync": "Weight sync",
}
TITLES |= {
    "position": "Gap by position in the response",
    "probability": "Gap by token probability",
    "scatter": "Rollout against trainer, token by token",
}
"""Headings of the report's sections."""


def sections(runs: Runs) -> list[Section]:
    """Build every section of the report that has a plot, in reading order; what is missing is said elsewhere."""
    drift = _curves(runs, "drift") if any(parts(run) is not None for run in runs.values()) else ()
    routing = present(*_curves(runs, "routing"), _replay(runs), _layers(runs))
    figures = {
        "gap": _curves(runs, "gap"),
        "drift": drift,
        "kl": _curves(runs, "kl"),
        "training": _curves(runs, "training"),
        "routing": routing,
    }
    figures |= {
        "learning-rate": _learning_rate(runs),
        "loss-scale": _curves(runs, "loss-scale"),
        "weight-sync": _curves(runs, "weight-sync"),
    }
    figures |= {kind: _profile(runs, kind) for kind in ("position", "probability")}
    figures["scatter"] = _scatter(runs)
    return [Section(id=id, title=TITLES[id], figures=plots) for id, plots in figures.items() if plots]


def _curves(runs: Runs, section: str) -> tuple[Figure, ...]:
    figures = []
    for curve in CURVES[section]:
        traces = step_traces(runs, curve.metric, log=curve.log)
        axis = log_axis(curve.unit) if curve.log else {"title": curve.unit}
        figures.append(figure_of(curve.id, curve.title, curve.caption, traces, STEP, axis))
    return present(*figures)


def _learning_rate(runs: Runs) -> tuple[Figure, ...]:
    """Plot rate and multiplier where at least one run controls its rate."""
    controlled = any(run.series(MULTIPLIER)[0] for run in runs.values())
    return _curves(runs, "learning-rate") if controlled else ()


def _replay(runs: Runs) -> Figure | None:
    """Plot k3 with and without replay, for the runs that measured both."""
    native = PREFIX + NATIVE + "k3_kl"
    both = [native in run.logged() for run in runs.values()]
    traces = []
    for kind, metric in (("replayed", PREFIX + "k3_kl"), ("its own routing", native)):
        for trace in step_traces(runs, metric, log=True):
            if not both[trace["meta"]["run"]]:
                continue
            trace["name"] += f", {kind}"
            if kind != "replayed":
                trace["line"] |= {"dash": "dot"}
                trace["marker"] |= {"symbol": trace["marker"]["symbol"].removesuffix("-open") + "-open"}
            traces.append(trace)
    caption = "The same tokens under the trainer's own routing (dotted): the distance is what replay saves."
    axis = log_axis("k3 (nats per token)")
    return figure_of("replay-k3", "k3 with and without replay", caption, traces, STEP, axis)


def _layers(runs: Runs) -> Figure | None:
    """Plot, by layer, the share of tokens for which engine and trainer chose different experts."""
    traces = []
    for index, (name, run) in enumerate(runs.items()):
        for order, split in enumerate(run.splits):
            layers = sorted(int(match[1]) for metric in run.logged(split) if (match := LAYER.fullmatch(metric)))
            values = [pooled(run, f"routing/layer_{layer}_set_mismatch", split) for layer in layers]
            if any(value is not None for value in values):
                traces.append(trace_of(name, index, layers, values, split=split, order=order))
    caption = (
        "Share of tokens; a layer far above the others has close scores, or an engine that routes it in another way."
    )
    axis = {"title": "share of tokens", "rangemode": "tozero"}
    return figure_of("flips-by-layer", "Other experts, by layer", caption, traces, {"title": "layer"}, axis)


def _profile(runs: Runs, kind: str) -> tuple[Figure, ...]:
    """Plot mean and share of the gap in each bin of a profile."""
    means, shares, labels = list[Trace](), list[Trace](), dict[str, bool]()
    for index, (name, run) in enumerate(runs.items()):
        for order, split in enumerate(sorted({r.split for r in run.profiles}, key=lambda s: (s != "train", s))):
            profile = pool_profile(run, kind, split)
            if profile is None:
                continue
            bins = _bin_labels(profile, kind)
            for label, count in zip(bins, profile.count, strict=True):
                labels[label] = labels.get(label, False) or count > 0
            drawn = [mean if _drawable(mean, log=True) else None for mean in profile.mean]
            for traces, values, number in (
                (means, drawn, "mean |Δlogp| %{y:.3~g}"),
                (shares, profile.gap_share, "%{y:.1%} of the gap"),
            ):
                trace = trace_of(name, index, bins, values, split=split, order=order)
                trace["customdata"] = [list(pair) for pair in zip(profile.count, profile.largest, strict=True)]
                trace["hovertemplate"] = (
                    f"{number}<br>max |Δlogp| %{{customdata[1]:.3~g}}<br>%{{customdata[0]:,}} tokens"
                    "<extra>%{fullData.name}<br>%{x}</extra>"
                )
                traces.append(trace)
    filled = [label for label, some in labels.items() if some]
    axis: dict[str, Any] = {"type": "category", "categoryarray": filled, "range": [-0.4, len(filled) - 0.6]}
    if kind == "position":
        axis["title"] = "token index in the response, tools' tokens left out"
        read = "A line that climbs to the right means that the gap accumulates along the response."
    else:
        axis |= {"title": "probability given by the rollout engine", "tickangle": -40, "tickfont": {"size": 10}}
        read = "Rounding moves improbable tokens most; a high right end is a fault of its own."
    acts = "Share of the summed |Δlogp| per bin: high bins hold the tokens that a correction acts on."
    share = {"title": "share of the gap", "tickformat": ".0%", "rangemode": "tozero"}
    return present(
        figure_of(f"{kind}-mean", "Mean |Δlogp| per bin", read, means, axis, log_axis(GAP), unified=False),
        figure_of(f"{kind}-share", "Where the gap comes from", acts, shares, axis, share, unified=False),
    )


def _bin_labels(profile: Pooled, kind: str) -> list[str]:
    labels = []
    for i in range(len(profile.count)):
        low, high = profile.edges[i], profile.edges[i + 1] if i + 1 < len(profile.edges) else None
        if high is None:
            labels.append(f"≥ {low:g}")
        elif kind == "position":
            labels.append(f"{low:.0f}" if high - 1 == low else f"{low:.0f}–{high - 1:.0f}")
        else:
            labels.append(f"< {high:g}" if low == 0 else f"{low:g}–{high:g}")
    return labels


def _scatter(runs: Runs) -> tuple[Figure, ...]:
    """Plot how far apart both sides' probabilities of a sample of each run's tokens are; runs share the vertical scale."""
    points = {name: _points(run) for name, run in runs.items()}
    span = max((abs(b - a) for pairs, _ in points.values() for a, b in pairs), default=0.0) * 1.1 or 1e-3
    x = {"title": "rollout probability", "range": [-0.03, 1.03]}
    y = {"title": "trainer − rollout", "range": [-span, span], "exponentformat": "power", "zeroline": True}
    caption = "A sample of tokens: on the zero line both sides give a token the same probability."
    figures = []
    for index, (name, (pairs, split)) in enumerate(points.items()):
        trace = trace_of(name, index, [a for a, _ in pairs], [b - a for a, b in pairs])
        trace |= {"mode": "markers"}
        trace["marker"] |= {"opacity": 0.5, "color": style(index)["color"]}
        trace["hovertemplate"] = "rollout %{x:.4f}<br>difference %{y:.4~g}<extra>%{fullData.name}</extra>"
        title = f"{name}: trainer against rollout" if split == "train" else f"{name} ({split}): trainer against rollout"
        figures.append(figure_of(f"scatter-{index}", title, caption, [trace] if pairs else [], x, y, unified=False))
    return present(*figures)


def _points(run: RunData) -> tuple[list[tuple[float, float]], str]:
    """Return (rollout, trainer) probabilities of the train split; if it has none, of the first split that has some."""
    split = min((r.split for r in run.scatters), key=lambda s: (s != "train", s), default="train")
    pairs = [
        (math.exp(min(a, 0.0)), math.exp(min(b, 0.0)))
        for record in run.scatters
        if record.split == split
        for a, b in zip(record.rollout_logprobs, record.old_logprobs, strict=True)
    ]
    return pairs[:: -(-len(pairs) // MAX_SCATTER_POINTS) or 1], split


# Traces, axes and figures.


def plotly_js() -> str:
    """Return the script that draws the plots; raises PeerVersionError without plotly, whose package holds it."""
    try:
        package = resources.files("plotly")
    except ImportError as error:
        raise PeerVersionError(
            "the report needs plotly, which is not installed; run `pip install 'plotly>=6'`."
        ) from error
    # Importing what plotly draws with in Python takes longer than the rest of a report.
    return package.joinpath("package_data", "plotly.min.js").read_text(encoding="utf-8")


def style(index: int) -> dict[str, str]:
    """Return the color and Plotly marker of the run at an index, and a character of the marker's shape."""
    look = index % len(PALETTE)
    return {"color": PALETTE[look], "marker": MARKERS[look], "glyph": GLYPHS[look]}


def _drawable(value: float | None, log: bool) -> bool:
    return value is not None and (value > 0 or not log)


def step_traces(runs: Runs, metric: str, *, log: bool) -> list[Trace]:
    """Return the traces of one metric, or role: one for each run and split that has drawable values."""
    traces = []
    for index, (name, run) in enumerate(runs.items()):
        for order, split in enumerate(run.splits):
            steps, values = run.series(metric, split)
            if any(_drawable(value, log) for value in values):
                shown = [value if _drawable(value, log) else None for value in values]
                traces.append(trace_of(name, index, steps, shown, split=split, order=order))
    return traces


def trace_of(
    name: str, index: int, x: Sequence[Any], y: Sequence[Any], *, split: str = "train", order: int = 0
) -> Trace:
    look = style(index)
    label, dash, symbol, size = name, "solid", look["marker"], 5
    if split != "train":
        label, dash, symbol, size = f"{name}, {split}", DASHES[(order - 1) % 4], f"{symbol}-open", 8
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(x) <= MAX_MARKERS else "lines",
        "x": list(x),
        "y": list(y),
        "name": html.escape(label),  # Plotly reads names as markup
        "meta": {"run": index},
        "line": {"color": look["color"], "width": 2, "dash": dash},
        "marker": {"symbol": symbol, "size": size},
        "hovertemplate": "%{y:.3~g}<extra>%{fullData.name}</extra>",
    }


def log_axis(title: str) -> dict[str, Any]:
    return {"title": title, "type": "log", "exponentformat": "power"}


def present(*figures: Figure | None) -> tuple[Figure, ...]:
    return tuple(figure for figure in figures if figure is not None)


def figure_of(
    id: str,
    title: str,
    caption: str,
    traces: Sequence[Trace],
    x: dict[str, Any],
    y: dict[str, Any],
    *,
    unified: bool = True,
) -> Figure | None:
    """Return a figure; None if it has no traces."""
    if not traces:
        return None
    layout = {
        **LAYOUT,
        "showlegend": len(traces) > 1,
        "hovermode": "x unified" if unified else "closest",
        "xaxis": {**AXIS, **x, "title": {"text": x["title"]}},
        "yaxis": {**AXIS, **y, "title": {"text": y["title"]}},
    }
    data = json.dumps({"data": traces, "layout": layout}, allow_nan=False)
    # The JSON stands in a script element, which only "<" could end; JSON allows "<" as an escape.
    return Figure(id=id, title=title, caption=caption, json=data.replace("<", "\\u003c"))
