"""The plots of the report, as Plotly figures serialised to JSON; the page sets the colours of text and grid.

A run has the same colour and marker in every plot. Evaluation splits are dotted and have open markers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mismatch_ext.host_names import Role
from mismatch_ext.log_reading import RunData
from mismatch_ext.report import drift
from mismatch_ext.report.charts import Figure, drawable, figure_of, log_axis, present, style, trace_of
from mismatch_ext.report.learning_rate import learning_rate
from mismatch_ext.report.lines import over_steps, step_traces
from mismatch_ext.report.profiles import Pooled, pool_profile
from mismatch_ext.report.routing import replay
from mismatch_ext.report.summary import ABS_DIFF_MAX, ABS_DIFF_MEAN, PREFIX

MAX_SCATTER_POINTS = 1500


@dataclass(frozen=True, kw_only=True)
class Section:
    """A heading with figures below it, or with a sentence that says why there are none."""

    id: str
    title: str
    figures: tuple[Figure, ...]
    absent: str


def sections(runs: Mapping[str, RunData]) -> list[Section]:
    """Build every plot of the report in reading order."""
    return [
        Section(id="gap", title="Gap over steps", figures=_gap(runs), absent="No gap metrics were recorded."),
        Section(id="drift", title="Numerics and drift", figures=drift.figures(runs), absent=""),
        Section(id="kl", title="KL and effective sample size", figures=_kl(runs), absent="No k3 was recorded."),
        Section(
            id="training",
            title="Reward, length and loss",
            figures=_training(runs),
            absent="No reward, length or loss was recorded.",
        ),
        Section(id="routing", title="Routing replay", figures=replay(runs), absent=""),
        Section(id="learning-rate", title="Learning-rate control", figures=learning_rate(runs), absent=""),
        Section(id="loss-scale", title="Loss scale", figures=_loss_scale(runs), absent=""),
        Section(id="weight-sync", title="Weight sync", figures=_weight_sync(runs), absent=""),
        Section(
            id="position",
            title="Gap by position in the response",
            figures=_profile(runs, "position"),
            absent="No per-position profile was recorded.",
        ),
        Section(
            id="probability",
            title="Gap by token probability",
            figures=_profile(runs, "probability"),
            absent="No per-probability profile was recorded.",
        ),
        Section(
            id="scatter",
            title="Rollout against trainer, token by token",
            figures=_scatter(runs),
            absent="No token samples were recorded.",
        ),
    ]


def _gap(runs: Mapping[str, RunData]) -> tuple[Figure, ...]:
    return present(
        over_steps(
            runs,
            "gap-mean",
            PREFIX + ABS_DIFF_MEAN,
            "Mean |Δlogp|",
            "mean |Δlogp| (nat)",
            "Lower is better: 1e-4 and below is rounding, healthy bfloat16 runs report 0.01 to 0.02.",
            log=True,
        ),
        over_steps(
            runs,
            "gap-max",
            PREFIX + ABS_DIFF_MAX,
            "Largest |Δlogp|",
            "max |Δlogp| (nat)",
            "The worst single token of each step; jumps far above the mean point at few broken tokens.",
            log=True,
        ),
    )


def _kl(runs: Mapping[str, RunData]) -> tuple[Figure, ...]:
    return present(
        over_steps(
            runs,
            "k3",
            PREFIX + "k3_kl",
            "k3 estimate of KL(rollout ‖ trainer)",
            "k3 (nat per token)",
            "Grows with the square of the gap; a slow rise over the run is how a collapse announces itself.",
            log=True,
        ),
        over_steps(
            runs,
            "ess",
            PREFIX + "ess_seq",
            "Effective sample size of sequence weights",
            "ESS (fraction of the batch)",
            "At 1 every sequence counts fully under importance sampling; near 0 a few carry the batch.",
        ),
    )


def _training(runs: Mapping[str, RunData]) -> tuple[Figure, ...]:
    return present(
        over_steps(
            runs,
            "reward",
            Role.REWARD,
            "Reward",
            "mean reward",
            "Whether training still learns while the gap moves.",
        ),
        over_steps(
            runs,
            "length",
            Role.LENGTH,
            "Response length",
            "mean length (tokens)",
            "Longer responses sum more per-token differences, so the sequence-level gap follows this curve.",
        ),
        over_steps(
            runs,
            "loss",
            Role.LOSS,
            "Loss",
            "loss",
            "Of no meaning by its size: advantages are centred. A jump, or NaN, comes before a collapse.",
        ),
        over_steps(
            runs,
            "grad-norm",
            Role.GRAD_NORM,
            "Gradient norm",
            "norm before clipping",
            "Spikes that come with spikes of the gap are made by few tokens, which a correction acts on.",
            log=True,
        ),
        over_steps(
            runs,
            "entropy",
            Role.ENTROPY,
            "Entropy",
            "entropy (nat per token)",
            "A policy that is sure of its tokens leaves less room for a gap, and less to explore.",
        ),
    )


def _loss_scale(runs: Mapping[str, RunData]) -> tuple[Figure, ...]:
    traces = step_traces(runs, PREFIX + "loss_scale", log=True)
    for trace in traces:
        trace["line"] |= {"shape": "hv"}
    for index, (name, run) in enumerate(runs.items()):
        rows = list(zip(*run.series(PREFIX + "loss_scale"), strict=True))
        fell = {step: b for (_, a), (step, b) in zip(rows, rows[1:], strict=False) if a and b and b < a}
        steps = sorted(set(fell) | {event.step for event in run.events if event.name == "overflow"})
        if not steps:
            continue
        pairs = zip(*run.series(PREFIX + "loss_scale"), strict=True)
        known = {step: scale for step, scale in pairs if drawable(scale, log=True)}
        known |= {step: scale for step, scale in fell.items() if drawable(scale, log=True)}
        trace = trace_of(name, index, steps, [known.get(step, 1.0) for step in steps])
        look = {"symbol": "x", "size": 10, "color": style(index)["color"]}
        trace |= {"mode": "markers", "marker": look}
        trace["hovertemplate"] = "overflow at step %{x}<extra>%{fullData.name}</extra>"
        traces.append(trace)
    return present(
        figure_of(
            "loss-scale",
            "Loss scale and overflows",
            "Each overflow (×) skips one step and lowers the scale; a scale that only falls is a fault.",
            traces,
            x={"title": "optimizer step"},
            y=_power_of_two_axis(traces),
        )
    )


def _weight_sync(runs: Mapping[str, RunData]) -> tuple[Figure, ...]:
    return present(
        over_steps(
            runs,
            "weight-sync",
            PREFIX + "weight_sync_gap",
            "Gap on the probe sequences after each weight update",
            "mean |Δlogp| (nat)",
            "Stays flat while the engine's prefill computes with the trainer's weights; a jump means stale or garbled ones.",
            log=True,
        )
    )


def _power_of_two_axis(traces: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    axis = log_axis(traces, "loss scale")
    values = [value for trace in traces for value in trace["y"] if value is not None]
    low, high = math.floor(math.log2(min(values, default=1))), math.ceil(math.log2(max(values, default=1)))
    ticks = range(low, min(high, 1023) + 1, -(-(high - low) // 8) or 1)
    return axis | {"tickvals": [2.0**k for k in ticks], "ticktext": [f"2<sup>{k}</sup>" for k in ticks]}


def _profile(runs: Mapping[str, RunData], kind: str) -> tuple[Figure, ...]:
    means, shares = [], []
    labels: list[str] = []
    for index, (name, run) in enumerate(runs.items()):
        splits = list(dict.fromkeys(sorted((r.split for r in run.profiles), key=lambda s: (s != "train", s))))
        for order, split in enumerate(splits):
            pooled = pool_profile(run, kind, split)
            if pooled is None:
                continue
            names = _bin_labels(pooled, kind)
            labels += [label for label in names if label not in labels]
            means.append(_profile_trace(name, index, names, pooled, pooled.mean, True, split, order))
            shares.append(_profile_trace(name, index, names, pooled, pooled.gap_share, False, split, order))
    what = (
        "token index in the response, tools' tokens left out"
        if kind == "position"
        else "probability given by the rollout engine"
    )
    filled = {label for trace in means for label, n in zip(trace["x"], trace["customdata"], strict=True) if n[0]}
    axis: dict[str, Any] = {
        "title": what,
        "type": "category",
        "categoryarray": [n for n in labels if n in filled],
    }
    axis |= {"range": [-0.4, len(filled) - 0.6]}
    if kind == "probability":
        axis |= {"tickangle": -40, "tickfont": {"size": 10}}
    read = {
        "position": "A line that climbs to the right means that the gap accumulates along the response.",
        "probability": "Rounding moves improbable tokens most; a high right end is a fault of its own.",
    }
    return present(
        figure_of(
            f"{kind}-mean",
            "Mean |Δlogp| per bin",
            read[kind],
            means,
            axis,
            log_axis(means, "mean |Δlogp| (nat)"),
        ),
        figure_of(
            f"{kind}-share",
            "Where the gap comes from",
            "Share of the summed |Δlogp| per bin: high bins hold the tokens that a correction acts on.",
            shares,
            axis,
            {"title": "share of the gap", "tickformat": ".0%", "rangemode": "tozero"},
        ),
    )


def _profile_trace(
    name: str,
    index: int,
    labels: Sequence[str],
    pooled: Pooled,
    values: Sequence[float | None],
    log: bool,
    split: str,
    order: int,
) -> dict[str, Any]:
    trace = trace_of(name, index, labels, [v if drawable(v, log) else None for v in values], split=split, order=order)
    trace["customdata"] = [list(pair) for pair in zip(pooled.count, pooled.largest, strict=True)]
    number = "mean |Δlogp| %{y:.3~g}" if log else "%{y:.1%} of the gap"
    trace["hovertemplate"] = (
        f"{number}<br>max |Δlogp| %{{customdata[1]:.3~g}}<br>%{{customdata[0]:,}} tokens"
        "<extra>%{fullData.name}<br>%{x}</extra>"
    )
    return trace


def _bin_labels(pooled: Pooled, kind: str) -> list[str]:
    labels = []
    for i in range(len(pooled.count)):
        low, high = pooled.edges[i], pooled.edges[i + 1] if i + 1 < len(pooled.edges) else None
        if kind == "position":
            last = None if high is None else high - 1
            text = f"{low:.0f}" if last == low else f"≥ {low:g}" if last is None else f"{low:.0f}–{last:.0f}"
        else:
            text = f"≥ {low:g}" if high is None else f"< {high:g}" if low == 0 else f"{low:g}–{high:g}"
        labels.append(text)
    return labels


def _scatter(runs: Mapping[str, RunData]) -> tuple[Figure, ...]:
    points = {name: _points(run) for name, run in runs.items()}
    span = max((abs(b - a) for pairs, _ in points.values() for a, b in pairs), default=0.0) * 1.1 or 1e-3
    figures: list[Figure | None] = []
    for index, (name, (pairs, split)) in enumerate(points.items()):
        where = "" if split == "train" else f" ({split})"
        for kind, number in (("both", _trainer), ("difference", _difference)):
            trace = trace_of(name, index, [a for a, _ in pairs], [number(a, b) for a, b in pairs])
            trace |= {"mode": "markers"}
            trace["marker"] |= {"size": 5, "opacity": 0.5, "color": style(index)["color"]}
            trace["hovertemplate"] = (
                "rollout %{x:.4f}<br>" + kind.replace("both", "trainer") + " %{y:.4~g}<extra>%{fullData.name}</extra>"
            )
            x = {"title": "rollout probability", "range": [-0.03, 1.03]}
            y = {"title": "trainer probability", "range": [-0.03, 1.03]}
            title, caption = (
                "trainer against rollout",
                "On the diagonal both sides give a token the same probability.",
            )
            end = 1.0
            if kind == "difference":
                y = {"title": "trainer − rollout", "range": [-span, span], "exponentformat": "power"}
                title = "difference of the probabilities"
                caption = "The same tokens with the diagonal laid flat; the vertical scale is shared by all runs."
                end = 0.0
            line = {
                "type": "line",
                "x0": 0,
                "y0": 0,
                "x1": 1,
                "y1": end,
                "layer": "below",
                "line": {"width": 1},
            }
            figures.append(
                figure_of(
                    f"scatter-{index}-{kind}",
                    f"{name}{where}: {title}",
                    caption,
                    [trace] if pairs else [],
                    x,
                    y,
                    shapes=[line],
                )
            )
    return present(*figures)


def _trainer(rollout: float, trainer: float) -> float:
    return trainer


def _difference(rollout: float, trainer: float) -> float:
    return trainer - rollout


def _points(run: RunData) -> tuple[list[tuple[float, float]], str]:
    """Return (rollout, trainer) probabilities of the train split; if it has none, of the first split that has some."""
    split = min((r.split for r in run.scatters), key=lambda s: (s != "train", s), default="train")
    probability: Callable[[float], float] = lambda logprob: math.exp(min(logprob, 0.0))  # noqa: E731
    pairs = [
        (probability(a), probability(b))
        for record in run.scatters
        if record.split == split
        for a, b in zip(record.rollout_logprobs, record.old_logprobs, strict=True)
    ]
    stride = -(-len(pairs) // MAX_SCATTER_POINTS) or 1
    return pairs[::stride], split
