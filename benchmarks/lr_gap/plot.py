"""The plot of a comparison."""

from __future__ import annotations

import statistics
from pathlib import Path

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from benchmarks.lr_gap.analysis import per_rollout
from benchmarks.lr_gap.tables import TITLES, Results

# Axis type and range; None takes what is there, column by column.
DRAWN: dict[str, tuple[str, tuple[float, float] | None]] = {
    "k3": ("log", None),
    "F(1.1)": ("linear", (0.0, 0.1)),
    "gradient norm": ("log", (-1.3, 0.7)),
    "reward": ("linear", (0.0, 1.0)),
    "learning rate": ("log", None),
}
# Okabe and Ito's palette, safe for colour-blind readers.
NAMES = {"off": "constant rate", "flat": "constant at the mean rate of control", "on": "learning-rate control"}
COLOURS = {"off": "#D55E00", "flat": "#8A8A8A", "on": "#0072B2"}


def figure(results: Results) -> go.Figure:
    """Draw each metric over steps, engines side by side: thin lines are seeds, thick ones their mean."""
    drawn = make_subplots(
        rows=len(DRAWN),
        cols=len(results.engines),
        shared_xaxes=True,
        column_titles=[TITLES[engine] for engine in results.engines],
        vertical_spacing=0.03,
        horizontal_spacing=0.06,
    )
    for line, (metric, (scale, limits)) in enumerate(DRAWN.items(), start=1):
        for column, engine in enumerate(results.engines, start=1):
            for rate in (rate for rate in COLOURS if rate in results.rates):
                for trace in _traces(results, engine, rate, metric, legend=line == column == 1):
                    drawn.add_trace(trace, row=line, col=column)
            drawn.update_yaxes(type=scale, range=limits, exponentformat="power", row=line, col=column)
        drawn.update_yaxes(title=metric, row=line, col=1)
    for column in range(1, len(results.engines) + 1):
        drawn.update_xaxes(title="optimizer step", row=len(DRAWN), col=column)
    drawn.update_layout(
        template="plotly_white",
        width=1200,
        height=230 * len(DRAWN),
        margin={"t": 60, "b": 50, "l": 70, "r": 20},
        legend={"orientation": "h", "y": 1.06, "x": 0},
    )
    return drawn


def _traces(results: Results, engine: str, rate: str, metric: str, *, legend: bool) -> list[go.Scatter]:
    runs = [results.runs[engine, rate, seed].series for seed in range(results.seeds)]
    seeds = [per_rollout(one[metric], one["reward"].steps) for one in runs]
    colour, group = COLOURS[rate], {"legendgroup": rate}
    traces = [
        go.Scatter(
            x=one.steps,
            y=one.values,
            mode="lines",
            line={"color": colour, "width": 0.7},
            opacity=0.35,
            hoverinfo="skip",
            showlegend=False,
            **group,
        )
        for one in seeds
    ]
    mean = [statistics.fmean(values) for values in zip(*(one.values for one in seeds), strict=True)]
    traces.append(
        go.Scatter(
            x=seeds[0].steps,
            y=mean,
            mode="lines",
            line={"color": colour, "width": 2.5},
            name=NAMES[rate],
            hovertemplate=f"{metric} %{{y:.3g}} at step %{{x}}<extra>{rate}</extra>",
            showlegend=legend,
            **group,
        )
    )
    return traces


def write_figure(path: Path, results: Results) -> None:
    """Write the plot: as a page that loads nothing for `.html`, else as the image that the suffix names (needs kaleido)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn = figure(results)
    if path.suffix == ".html":
        # Plotly's default buttons include one that uploads the chart.
        config = {"displaylogo": False, "modeBarButtons": [["toImage", "zoom2d", "pan2d", "resetScale2d"]]}
        drawn.write_html(path, include_plotlyjs="inline", config=config)
    else:
        drawn.write_image(path)
