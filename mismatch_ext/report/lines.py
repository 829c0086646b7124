"""Plots of one metric over the steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mismatch_ext.log_reading import RunData
from mismatch_ext.report.charts import Figure, drawable, figure_of, log_axis, trace_of

MAX_POINTS = 2000
"""A curve of up to this many points is drawn unchanged; a longer one is thinned (see `thinned`)."""


def over_steps(
    runs: Mapping[str, RunData], id: str, metric: str, title: str, unit: str, caption: str, log: bool = False
) -> Figure | None:
    """Plot one metric, or role, over the steps, with one trace per run and split; None if nothing was recorded."""
    traces = step_traces(runs, metric, log=log)
    y = log_axis(traces, unit) if log else {"title": unit}
    return figure_of(id, title, caption, traces, x={"title": "optimizer step"}, y=y, unified=True)


def step_traces(runs: Mapping[str, RunData], metric: str, *, log: bool) -> list[dict[str, Any]]:
    """Return the traces of one metric: one for each run and split that has drawable values."""
    traces = []
    for index, (name, run) in enumerate(runs.items()):
        for order, split in enumerate(run.splits):
            steps, values = run.series(metric, split)
            if any(drawable(value, log) for value in values):
                steps, values = thinned(steps, values)
                shown = [value if drawable(value, log) else None for value in values]
                traces.append(trace_of(name, index, steps, shown, split=split, order=order))
    return traces


def thinned(steps: Sequence[int], values: Sequence[float | None]) -> tuple[list[int], list[float | None]]:
    """Return a curve unchanged or, if it is long, only the points that a reader would see.

    The steps are cut into `MAX_POINTS / 2` stretches. Both ends of the curve are kept and, in each stretch, the smallest value,
    the largest value and the first gap.

    Args:
        steps: Steps in ascending order.
        values: One value per step; None is a gap.
    """
    if len(steps) <= MAX_POINTS:
        return list(steps), list(values)
    width = (steps[-1] - steps[0] + 1) / (MAX_POINTS // 2)
    stretches: dict[int, dict[str, int]] = {}
    for at, (step, value) in enumerate(zip(steps, values, strict=True)):
        found = stretches.setdefault(int((step - steps[0]) / width), {})
        if value is None:
            found.setdefault("gap", at)
            continue
        low, high = values[found.setdefault("low", at)], values[found.setdefault("high", at)]
        if low is not None and value < low:
            found["low"] = at
        if high is not None and value > high:
            found["high"] = at
    kept = sorted({0, len(steps) - 1, *(at for found in stretches.values() for at in found.values())})
    return [steps[at] for at in kept], [values[at] for at in kept]
