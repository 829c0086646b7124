"""What the runs say: means over the last third, paired differences, differences of differences, and surges after the fact."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mismatch_ext.config import LrConfig
from mismatch_ext.log_reading import RunData
from mismatch_ext.lr import LrState, lr_step

METRICS = {
    "k3": "mismatch/k3_kl",
    "F(1.1)": "mismatch/f_1.1",
    "gradient norm": "grad_norm",
    "reward": "reward",
    "length": "completions/mean_length",
    "entropy": "entropy",
    "learning rate": "learning_rate",
    "multiplier": "mismatch/lr_multiplier",
}
# 97.5 % points of Student's t by degrees of freedom; with more than listed the last one is a little wide.
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


@dataclass(frozen=True, kw_only=True)
class Series:
    """One metric of one run.

    Args:
        steps: Optimizer steps taken when it was measured.
        values: The measurements; a rollout serves several steps, so there may be fewer than steps.
    """

    steps: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over seeds.

    Args:
        mean: The mean.
        half: Half width of the 95 % interval by Student's t; NaN with one seed.
        positive: Seeds above 0.
        negative: Seeds below 0.
        seeds: Number of seeds.
    """

    mean: float
    half: float
    positive: int
    negative: int
    seeds: int

    @property
    def clear(self) -> bool:
        """Whether the interval leaves out 0."""
        return abs(self.mean) > self.half

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """Return the estimate from one value per seed."""
        n = len(values)
        half = math.nan
        if n > 1:
            half = T_975[min(n - 2, len(T_975) - 1)] * statistics.stdev(values) / math.sqrt(n)
        positive, negative = sum(x > 0 for x in values), sum(x < 0 for x in values)
        return cls(mean=statistics.fmean(values), half=half, positive=positive, negative=negative, seeds=n)


def series(data: RunData) -> dict[str, Series]:
    """Return every metric of a run that was measured while training."""
    found = {}
    for name, key in METRICS.items():
        measured = ((s.step, s.metrics.get(key)) for s in data.steps if s.split == "train")
        points = [(step, value) for step, value in measured if value is not None]
        if points:
            found[name] = Series(steps=tuple(p[0] for p in points), values=tuple(p[1] for p in points))
    return found


def per_rollout(one: Series, starts: Sequence[int]) -> Series:
    """Return a metric's mean over the steps that each rollout serves.

    Args:
        one: The metric.
        starts: First step of each rollout, in order.
    """
    groups: dict[int, list[float]] = {}
    for step, value in zip(one.steps, one.values, strict=True):
        groups.setdefault(starts[bisect_right(starts, step) - 1], []).append(value)
    return Series(steps=tuple(groups), values=tuple(map(statistics.fmean, groups.values())))


def last_third(one: Series, steps: int) -> float:
    """Return the mean of what was measured in the last third of a run, or the last measurement if there is none there.

    Args:
        one: The metric.
        steps: Steps of the run.
    """
    late = [value for step, value in zip(one.steps, one.values, strict=True) if step > steps - steps / 3]
    return statistics.fmean(late or one.values[-1:])


def paired(on: Mapping[int, float], off: Mapping[int, float]) -> dict[int, float]:
    """Return on - off for each seed that has both."""
    return {seed: on[seed] - off[seed] for seed in sorted(on.keys() & off.keys())}


def difference_in_differences(
    on: Mapping[int, float], off: Mapping[int, float], control_on: Mapping[int, float], control_off: Mapping[int, float]
) -> dict[int, float]:
    """Return, for each seed that has all four, what the rate does with mismatch beyond what it does without.

        (on - off) - (control_on - control_off)

    Only this is attributable to mismatch.
    """
    return paired(paired(on, off), paired(control_on, control_off))


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and standard deviation over seeds; 0 for one seed."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def surge_step(data: RunData, config: LrConfig) -> int | None:
    """Return the step at which a rule that waits for a surge would have found one, from what a run recorded.

    Args:
        data: A run without learning-rate control.
        config: The rule; its trigger is `response_length` or `mismatch_kl`.
    """
    state = LrState(trigger=config.trigger)
    for record in data.steps:
        if record.split != "train" or record.metrics.get(METRICS["reward"]) is None:
            continue
        given = {
            "response_length": record.metrics.get(METRICS["length"]),
            "truncated_fraction": record.metrics.get("completions/clipped_ratio"),
        }
        if config.trigger == "mismatch_kl":
            given = {"mismatch_kl": record.metrics.get(METRICS["k3"])}
        # The log numbers a step by the steps taken after it. Joining at the first keeps resumed records readable.
        state, _ = lr_step(state, given, config, step=max(record.step - 1, 0))
        if state.surge_step is not None:
            return state.surge_step
    return None
