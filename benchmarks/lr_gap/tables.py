"""The tables that a comparison prints."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lr_gap.analysis import (
    Estimate,
    Series,
    difference_in_differences,
    last_third,
    paired,
    series,
    spread,
    surge_step,
)
from mismatch_ext.config import LrConfig
from mismatch_ext.log_reading import RunData, read_run

CONTROL = "trainer"
TITLES = {"bf16": "vLLM bf16", "fp8_kv": "vLLM bf16, fp8 KV cache", CONTROL: "control: trainer samples"}
RATES = ("off", "on", "flat")
"""Constant rate, controlled rate, and a constant one at the mean of the controlled."""
SHOWN = ("k3", "F(1.1)", "gradient norm", "reward", "accuracy", "length")
FOLLOWED = ("k3", "F(1.1)", "gradient norm", "entropy", "reward")
ACCURACY = "accuracy"
"""Of the trainer's own policy after the last step; `reward` is of the policy that sampled."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A finished run.

    Args:
        data: What it recorded.
        series: Metrics by step.
        accuracy: Fraction solved by the trainer's policy after the last step.
    """

    data: RunData
    series: dict[str, Series]
    accuracy: float

    def value(self, metric: str, steps: int) -> float:
        """Return a metric's mean over the last third of the run, or the accuracy at its end."""
        return self.accuracy if metric == ACCURACY else last_third(self.series[metric], steps)


@dataclass(frozen=True, kw_only=True)
class Results:
    """All runs of a comparison.

    Args:
        engines: Engines that were compared.
        rates: Rates that were compared.
        seeds: Number of seeds.
        steps: Optimizer steps of every run.
        runs: Runs by engine, rate and seed.
    """

    engines: tuple[str, ...]
    rates: tuple[str, ...]
    seeds: int
    steps: int
    runs: dict[tuple[str, str, int], Run]

    @classmethod
    def read(cls, out: Path, engines: Sequence[str], rates: Sequence[str], seeds: int, steps: int) -> Results:
        """Read the runs in a folder."""
        runs = {}
        for engine in engines:
            for rate in rates:
                for seed in range(seeds):
                    folder = out / f"{engine}-{rate}-seed{seed}"
                    data = read_run(folder / "mismatch")
                    accuracy = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))["accuracy"]
                    runs[engine, rate, seed] = Run(data=data, series=series(data), accuracy=accuracy)
        return cls(engines=tuple(engines), rates=tuple(rates), seeds=seeds, steps=steps, runs=runs)

    def by_seed(self, engine: str, rate: str, metric: str) -> dict[int, float]:
        """Return a metric's value for each seed."""
        return {seed: self.runs[engine, rate, seed].value(metric, self.steps) for seed in range(self.seeds)}


def row(*cells: object) -> str:
    """Return a line of a Markdown table."""
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def table(heading: Sequence[str], rows: Sequence[str]) -> str:
    """Return a Markdown table."""
    return "\n".join([row(*heading), row(*("---" for _ in heading)), *rows])


def number(value: float) -> str:
    """Write a figure with three digits; small ones by their power of ten."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    return f"{value:.1e}" if abs(value) < 1e-2 else f"{value:.3g}"


def estimate(one: Estimate) -> str:
    """Write an estimate: mean, interval and the seeds above and below 0; bold where the interval leaves out 0."""
    text = f"{number(one.mean)} ± {number(one.half)}"
    return f"{f'**{text}**' if one.clear else text} ({one.positive}+ {one.negative}-)"


def levels(results: Results) -> str:
    """Return each engine's metrics with and without control."""
    rows = []
    for engine in results.engines:
        for rate in results.rates:
            cells = []
            for metric in SHOWN:
                mean, std = spread(list(results.by_seed(engine, rate, metric).values()))
                cells.append(f"{number(mean)} ± {number(std)}")
            rows.append(row(TITLES[engine], rate, *cells))
    return table(("rollouts by", "rate", *SHOWN), rows)


def differences(results: Results, base: str = "off") -> str:
    """Return what control changes, by engine, against a constant rate."""
    rows = []
    for engine in results.engines:
        found = [
            paired(results.by_seed(engine, "on", metric), results.by_seed(engine, base, metric)) for metric in SHOWN
        ]
        rows.append(row(TITLES[engine], *(estimate(Estimate.of(list(one.values()))) for one in found)))
    return table(("rollouts by", *SHOWN), rows)


def attributable(results: Results, base: str = "off") -> str:
    """Return what control changes with mismatch beyond what it changes without."""
    rows = []
    for engine in (name for name in results.engines if name != CONTROL):
        cells = []
        for metric in SHOWN:
            four = [results.by_seed(name, rate, metric) for name in (engine, CONTROL) for rate in ("on", base)]
            cells.append(estimate(Estimate.of(list(difference_in_differences(*four).values()))))
        rows.append(row(TITLES[engine], *cells))
    return table(("rollouts by", *SHOWN), rows)


def cost(results: Results) -> str:
    """Return what mismatch changes by itself: each engine minus the control at the same rate."""
    rows = []
    for engine in (name for name in results.engines if name != CONTROL):
        for rate in results.rates:
            found = [
                paired(results.by_seed(engine, rate, metric), results.by_seed(CONTROL, rate, metric))
                for metric in SHOWN
            ]
            rows.append(row(TITLES[engine], rate, *(estimate(Estimate.of(list(one.values()))) for one in found)))
    return table(("rollouts by", "rate", *SHOWN), rows)


def by_multiplier(results: Results) -> str:
    """Return gap and gradient norm at each multiplier of the rate, beside the uncontrolled runs in the same steps."""
    rows = []
    for engine in results.engines:
        multipliers = results.runs[engine, "on", 0].series["multiplier"]
        for multiplier in sorted(set(multipliers.values), reverse=True):
            steps = {s for s, v in zip(multipliers.steps, multipliers.values, strict=True) if v == multiplier}
            cells = []
            for metric in FOLLOWED:
                on, off = (_during(results, engine, rate, metric, steps) for rate in ("on", "off"))
                cells.append(f"{number(off)} → {number(on)}")
            rows.append(row(TITLES[engine], f"{multiplier:g}", *cells))
    return table(("rollouts by", "multiplier", *FOLLOWED), rows)


def _during(results: Results, engine: str, rate: str, metric: str, steps: set[int]) -> float:
    values = []
    for seed in range(results.seeds):
        one = results.runs[engine, rate, seed].series[metric]
        values += [v for s, v in zip(one.steps, one.values, strict=True) if s in steps]
    return statistics.fmean(values) if values else math.nan


def triggers(results: Results) -> str:
    """Return in how many runs without control a rule that waits for a surge would have found one."""
    # As many measurements in the baseline as a run of this length can spare.
    rollouts = len(results.runs[results.engines[0], "off", 0].series["reward"].steps)
    window = max(2, rollouts // 4)
    rules: dict[str, LrConfig] = {
        "response length": LrConfig(baseline_window=window),
        "mismatch KL": LrConfig(trigger="mismatch_kl", baseline_window=window),
    }
    rows = []
    for engine in results.engines:
        cells = []
        for config in rules.values():
            found = [surge_step(results.runs[engine, "off", seed].data, config) for seed in range(results.seeds)]
            hits = [str(step) for step in found if step is not None]
            cells.append(f"{len(hits)} of {results.seeds}" + (f" (steps {', '.join(hits)})" if hits else ""))
        rows.append(row(TITLES[engine], *cells))
    return table(("rollouts by", *rules), rows)


def accuracies(results: Results) -> str:
    """Return the accuracy at the end of every run."""
    rows = [
        row(TITLES[engine], rate, *(number(x) for x in results.by_seed(engine, rate, ACCURACY).values()))
        for engine in results.engines
        for rate in results.rates
    ]
    return table(["rollouts by", "rate", *(f"seed {seed}" for seed in range(results.seeds))], rows)


def rollouts(results: Results) -> str:
    """Return the gap of single rollouts by engine, over all of its runs; the control's is what is left without mismatch."""
    rows = []
    for engine in results.engines:
        runs = [results.runs[engine, rate, seed] for rate in results.rates for seed in range(results.seeds)]
        gaps = [step.metrics for run in runs for step in run.data.steps if "mismatch/k3_kl" in step.metrics]
        k3 = [float(gap["mismatch/k3_kl"] or 0.0) for gap in gaps]
        first = statistics.fmean(run.series["k3"].values[0] for run in runs)
        largest_f = max(float(gap.get("mismatch/f_1.1") or 0.0) for gap in gaps)
        tokens = sum(float(gap.get("mismatch/tokens") or 0.0) for gap in gaps)
        cells = (len(k3), f"{tokens / 1e6:.3g} million", first, statistics.median(k3), max(k3))
        above = sum(x > 1e-9 for x in k3)
        rows.append(
            row(
                TITLES[engine],
                *(c if isinstance(c, (int, str)) else number(c) for c in cells),
                above,
                number(largest_f),
            )
        )
    heading = [
        "rollouts by",
        "rollouts",
        "tokens",
        "first k3",
        "median k3",
        "largest k3",
        "k3 > 1e-9",
        "largest F(1.1)",
    ]
    return table(heading, rows)


def report(results: Results) -> str:
    """Return all tables that the runs allow."""
    parts = {"Last third of the run, mean ± standard deviation over seeds": levels(results)}
    controlled = CONTROL in results.engines and len(results.engines) > 1
    for base in (rate for rate in ("off", "flat") if {rate, "on"} <= set(results.rates)):
        title = f"On minus {base}"
        parts[f"{title}, paired by seed: mean ± half of the 95 % interval (seeds above 0, below 0)"] = differences(
            results, base
        )
        if controlled:
            parts[f"{title}, beyond the control's"] = attributable(results, base)
    if controlled:
        parts["Engine minus control, at the same rate"] = cost(results)
    parts["Accuracy at the end, by seed"] = accuracies(results)
    parts["Gap of single rollouts"] = rollouts(results)
    if {"off", "on"} <= set(results.rates):
        parts["By multiplier, off → on in the same steps"] = by_multiplier(results)
    if "off" in results.rates:
        parts["Would a surge have been found, without control"] = triggers(results)
    head = (
        f"{results.seeds} seeds, {results.steps} optimizer steps each. {ACCURACY}: of the trainer's policy, at the end."
    )
    headers = results.runs[results.engines[0], results.rates[0], 0].data.headers
    versions = (
        ", ".join(f"{name} {version}" for name, version in headers[0]["versions"].items()) if headers else "unknown"
    )
    return "\n\n".join([head, f"Versions: {versions}.", *(f"### {title}\n\n{part}" for title, part in parts.items())])
