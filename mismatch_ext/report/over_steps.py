"""Plots of one metric over the steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mismatch_ext.report.charts import Figure, drawable, figure_of, log_axis, trace_of
from mismatch_ext.rundata import RunData


def over_steps(
    runs: Mapping[str, RunData], id: str, metric: str, title: str, unit: str, caption: str, log: bool = False
) -> Figure | None:
    """Plot one metric, or role, over the steps, a trace per run and split; None where nothing was recorded."""
    traces = step_traces(runs, metric, log=log)
    y = log_axis(traces, unit) if log else {"title": unit}
    return figure_of(id, title, caption, traces, x={"title": "optimizer step"}, y=y, unified=True)


def step_traces(runs: Mapping[str, RunData], metric: str, *, log: bool) -> list[dict[str, Any]]:
    """Return a trace of one metric per run and split that has drawable values."""
    traces = []
    for index, (name, run) in enumerate(runs.items()):
        for order, split in enumerate(run.splits):
            steps, values = run.series(metric, split)
            if any(drawable(value, log) for value in values):
                shown = [value if drawable(value, log) else None for value in values]
                traces.append(trace_of(name, index, steps, shown, split=split, order=order))
    return traces
