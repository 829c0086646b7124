"""The tables that a comparison prints: means over the last third of a run, and differences paired by seed."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.harness import of_the_mean
from mismatch_ext.config import LrConfig
from mismatch_ext.log_reading import RunData, read_run
from mismatch_ext.lr import LrState, lr_step

CONTROL = "trainer"
TITLES = {"bf16": "vLLM bf16", "fp8_kv": "vLLM bf16, fp8 KV cache", CONTROL: "control: trainer samples"}
RATES = ("off", "on", "flat")
"""Constant rate, controlled rate, and a constant one at the mean of the controlled."""
METRICS = {
    "k3": "mismatch/k3_kl",
    "F(1.1)": "mismatch/f_1.1",
    "gradient norm": "grad_norm",
    "reward": "reward",
    "accuracy": "",  # of the trainer's own policy after the last step; `reward` is of the policy that sampled
    "length": "completions/mean_length",
}
Runs = dict[tuple[str, str], list[RunData]]
"""By engine and rate, a run per seed."""
BySeed = list[float]


def series(data: RunData, key: str) -> list[tuple[int, float]]:
    """Return steps and values of a metric that was measured while training."""
    return [(s.step, value) for s in data.steps if s.split == "train" and (value := s.metrics.get(key)) is not None]


def last_third(points: Sequence[tuple[int, float]], steps: int) -> float:
    """Return the mean of what was measured in the last third of a run, or the last measurement if there is none there."""
    late = [value for step, value in points if step > steps - steps / 3]
    return statistics.fmean(late or [points[-1][1]])


def surge_step(data: RunData, config: LrConfig) -> int | None:
    """Return the step at which the rule would have found a surge of response length in a run without it."""
    state = LrState(trigger=config.trigger)
    for record in data.steps:
        if record.split != "train" or record.metrics.get("reward") is None:
            continue
        given = {
            "response_length": record.metrics.get(METRICS["length"]),
            "truncated_fraction": record.metrics.get("completions/clipped_ratio"),
        }
        # The log numbers a step by the steps taken after it. Joining at the first keeps resumed records readable.
        state, _ = lr_step(state, given, config, step=max(record.step - 1, 0))
        if state.surge_step is not None:
            return state.surge_step
    return None


def number(value: float) -> str:
    """Write a figure with three digits; small ones by their power of ten."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    return f"{value:.1e}" if abs(value) < 1e-2 else f"{value:.3g}"


def estimate(values: BySeed) -> str:
    """Write mean, half width and the seeds above and below 0; bold where the interval leaves out 0."""
    mean, half = of_the_mean(values)
    text = f"{number(mean)} ± {number(half)}"
    above, below = sum(x > 0 for x in values), sum(x < 0 for x in values)
    return f"{f'**{text}**' if abs(mean) > half else text} ({above}+ {below}-)"


def level(values: BySeed) -> str:
    """Write mean and standard deviation over seeds."""
    return f"{number(statistics.fmean(values))} ± {number(statistics.stdev(values) if len(values) > 1 else 0.0)}"


def table(rows: Mapping[tuple[str, ...], Sequence[str]], *heading: str) -> str:
    """Return a Markdown table."""
    cells = [heading, ["---"] * len(heading), *((*names, *row) for names, row in rows.items())]
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in cells)


def minus(a: BySeed, b: BySeed) -> BySeed:
    """Return the differences, seed by seed."""
    return [x - y for x, y in zip(a, b, strict=True)]


def report(out: Path, engines: Sequence[str], rates: Sequence[str], seeds: int, steps: int) -> str:
    """Read the runs in a folder and return all tables that they allow."""
    folders = {(e, r): [out / f"{e}-{r}-seed{seed}" for seed in range(seeds)] for e in engines for r in rates}
    runs = {key: [read_run(folder / "mismatch") for folder in those] for key, those in folders.items()}
    accuracy = {
        key: [json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))["accuracy"] for folder in those]
        for key, those in folders.items()
    }

    def of(engine: str, rate: str, metric: str) -> BySeed:
        if metric == "accuracy":
            return accuracy[engine, rate]
        return [last_third(series(data, METRICS[metric]), steps) for data in runs[engine, rate]]

    def rows(keys: Sequence[tuple[str, ...]], write: Callable[[BySeed], str], value: Callable[..., BySeed]) -> str:
        named = {(TITLES[key[0]], *key[1:]): [write(value(*key, metric)) for metric in METRICS] for key in keys}
        return table(named, "rollouts by", *(["rate"] if keys and len(keys[0]) == 2 else []), *METRICS)

    others = [engine for engine in engines if engine != CONTROL]
    controlled = CONTROL in engines and bool(others)
    both = [(engine, rate) for engine in engines for rate in rates]
    parts = {"Last third of the run, mean ± standard deviation over seeds": rows(both, level, of)}
    for base in (rate for rate in ("off", "flat") if {rate, "on"} <= set(rates)):

        def change(engine: str, metric: str, base: str = base) -> BySeed:
            return minus(of(engine, "on", metric), of(engine, base, metric))

        title = f"On minus {base}, paired by seed: mean ± half of the 95 % interval (seeds above 0, below 0)"
        parts[title] = rows([(engine,) for engine in engines], estimate, change)
        if controlled:  # only this is attributable to mismatch
            parts[f"On minus {base}, beyond the control's"] = rows(
                [(engine,) for engine in others],
                estimate,
                lambda engine, metric, change=change: minus(change(engine, metric), change(CONTROL, metric)),
            )
    if controlled:
        parts["Engine minus control, at the same rate"] = rows(
            [(engine, rate) for engine in others for rate in rates],
            estimate,
            lambda engine, rate, metric: minus(of(engine, rate, metric), of(CONTROL, rate, metric)),
        )
    named = {(TITLES[e], r): list(map(number, values)) for (e, r), values in accuracy.items()}
    parts["Accuracy at the end, by seed"] = table(named, "rollouts by", "rate", *(f"seed {n}" for n in range(seeds)))
    parts["Gap of single rollouts"] = rollouts(runs, engines)
    if "off" in rates:
        parts["Would a surge have been found, without control"] = triggers(runs, engines)
    head = f"{seeds} seeds, {steps} optimizer steps each. accuracy: of the trainer's policy, at the end."
    versions = ", ".join(f"{name} {v}" for name, v in runs[engines[0], rates[0]][0].headers[0]["versions"].items())
    return "\n\n".join([head, f"Versions: {versions}.", *(f"### {title}\n\n{part}" for title, part in parts.items())])


def rollouts(runs: Runs, engines: Sequence[str]) -> str:
    """Return the gap of single rollouts by engine; the control's is what is left without a mismatch."""
    named = {}
    for engine in engines:
        those = [data for (name, _), seeds in runs.items() if name == engine for data in seeds]
        gaps = [step.metrics for data in those for step in data.steps if METRICS["k3"] in step.metrics]
        k3 = [float(gap[METRICS["k3"]] or 0.0) for gap in gaps]
        first = statistics.fmean(series(data, METRICS["k3"])[0][1] for data in those)
        tokens, share = ([float(gap.get(key) or 0.0) for gap in gaps] for key in ("mismatch/tokens", METRICS["F(1.1)"]))
        values = map(number, (first, statistics.median(k3), max(k3)))
        named[(TITLES[engine],)] = [
            str(len(k3)), f"{sum(tokens) / 1e6:.3g} million", *values, str(sum(x > 1e-9 for x in k3)), number(max(share)),
        ]  # fmt: skip
    heading = ("rollouts", "tokens", "first k3", "median k3", "largest k3", "k3 > 1e-9", "largest F(1.1)")
    return table(named, "rollouts by", *heading)


def triggers(runs: Runs, engines: Sequence[str]) -> str:
    """Return in how many runs without control the rule would have found a surge."""
    # As many measurements in the baseline as a run of this length can spare.
    rule = LrConfig(baseline_window=max(2, len(series(runs[engines[0], "off"][0], METRICS["reward"])) // 4))
    named = {}
    for engine in engines:
        surges = [surge_step(data, rule) for data in runs[engine, "off"]]
        named[(TITLES[engine],)] = [f"{sum(step is not None for step in surges)} of {len(surges)}"]
    return table(named, "rollouts by", "response length")
