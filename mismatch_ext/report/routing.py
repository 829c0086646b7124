"""Plots of routing replay: how often engine and trainer choose different experts, and the gap with and without replay."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mismatch_ext.log_reading import RunData
from mismatch_ext.report.charts import Figure, figure_of, log_axis, present, trace_of
from mismatch_ext.report.lines import over_steps, step_traces
from mismatch_ext.report.summary import NATIVE, PREFIX, pooled

ROUTING = "routing/"
LAYER = re.compile(re.escape(PREFIX + ROUTING) + r"layer_(\d{1,6})_set_mismatch")


def replay(runs: Mapping[str, RunData]) -> tuple[Figure, ...]:
    """Plot what was measured about routing replay; nothing if nothing was measured."""
    return present(
        over_steps(
            runs,
            "flips",
            PREFIX + ROUTING + "set_mismatch_frac",
            "Other experts",
            "share of (token, layer) pairs",
            "How often the trainer would have chosen other experts than those that it replays; 0 in float32.",
        ),
        _saved(runs),
        _layers(runs),
    )


def _saved(runs: Mapping[str, RunData]) -> Figure | None:
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
    return figure_of(
        "replay-k3",
        "k3 with and without replay",
        "The same tokens under the trainer's own routing (dotted): the distance is what replay saves.",
        traces,
        x={"title": "optimizer step"},
        y=log_axis(traces, "k3 (nat per token)"),
        unified=True,
    )


def _layers(runs: Mapping[str, RunData]) -> Figure | None:
    """Plot, by layer, the share of tokens for which engine and trainer chose different experts."""
    traces: list[dict[str, Any]] = []
    for index, (name, run) in enumerate(runs.items()):
        for order, split in enumerate(run.splits):
            layers = sorted(int(match[1]) for metric in run.logged(split) if (match := LAYER.fullmatch(metric)))
            values = [pooled(run, f"{ROUTING}layer_{layer}_set_mismatch", split) for layer in layers]
            if any(value is not None for value in values):
                traces.append(trace_of(name, index, layers, values, split=split, order=order))
    return figure_of(
        "flips-by-layer",
        "Other experts, by layer",
        "Share of tokens; a layer far above the others has close scores, or an engine that routes it in another way.",
        traces,
        x={"title": "layer"},
        y={"title": "share of tokens", "rangemode": "tozero"},
        unified=True,
    )
