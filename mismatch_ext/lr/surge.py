"""Finds the surge of a statistic, by comparing a smoothed value with a robust baseline."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from statistics import median

from mismatch_ext.config import LrConfig, Trigger

LEAST: dict[Trigger, float] = {"response_length": 1.0, "mismatch_kl": 1e-3, "grad_norm": 0.0, "f_tau": 0.01}
"""Least value of a surge per trigger: 1e-3 nats of mismatch KL are NeMo RL's limit of a healthy run, the others are a choice."""
SMOOTHING = 5
"""Measurements in the median that is compared, no more than the baseline has; fewer than half of them out of line change nothing.
A choice: with batches of 8 responses or more no flat length fires, with 4 it does in about one of 20 runs of 1,000 batches."""
NOISE_MARGIN = 4.0
"""Robust standard deviations above the baseline that a surge has at least; a choice."""
TRUNCATED_RISE = 0.5
"""Rise of the fraction of truncated responses over its baseline that is a surge of lengths."""
MAD_TO_STD = 1.4826
"""Standard deviation over median absolute deviation of a normal distribution."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One batch.

    Args:
        step: Step at which it was measured.
        value: The trigger's statistic.
        truncated: Fraction of truncated responses; None if unknown.
    """

    step: int
    value: float
    truncated: float | None = None


@dataclass(frozen=True, kw_only=True)
class Level:
    """A baseline.

    Args:
        center: Median of the measurements.
        spread: Robust standard deviation of the measurements.
    """

    center: float
    spread: float

    @classmethod
    def of(cls, values: list[float]) -> Level:
        """Return the level of some values."""
        center = median(values)
        return cls(center=center, spread=MAD_TO_STD * median(abs(x - center) for x in values))


@dataclass(frozen=True, kw_only=True)
class SurgeState:
    """The detector's state.

    Args:
        history: Last measurements, oldest first.
        baseline: Level of the statistic; None until there are enough measurements.
        truncated_baseline: Level of the truncated fraction; None if unknown or not used.
    """

    history: tuple[Measurement, ...] = ()
    baseline: Level | None = None
    truncated_baseline: Level | None = None


class SurgeDetector:
    """Tells at which step a statistic surged. The paper shows surges but gives no detector: all of this is a choice.

    It surges when the median of its last `SMOOTHING` measurements reaches the largest of `surge_ratio` * baseline, baseline +
    `NOISE_MARGIN` * (robust standard deviation of the baseline's measurements), and `LEAST`. The baseline is the median of the
    first measurements of the run, so that slow growth counts once it is large; a measurement is one batch of rollouts. Lengths
    surge as well when the fraction of truncated responses rises by `TRUNCATED_RISE` over its baseline: with half of them at the
    limit the mean cannot show growth.

    Args:
        config: The `lr` section.
    """

    def __init__(self, config: LrConfig) -> None:
        self.config = config
        self.least = LEAST[config.trigger]
        self.smoothing = min(SMOOTHING, config.baseline_window)
        self.counts_truncated = config.trigger == "response_length"

    def threshold(self, baseline: Level) -> float:
        """Return the smoothed value from which on there is a surge over a baseline; 0 means that no value is a surge."""
        margin = NOISE_MARGIN * baseline.spread
        return max(self.config.surge_ratio * baseline.center, baseline.center + margin, self.least)

    def truncated_threshold(self, baseline: Level) -> float:
        """Return the smoothed truncated fraction from which on there is a surge; above 1 means that no fraction is one."""
        return baseline.center + max(TRUNCATED_RISE, NOISE_MARGIN * baseline.spread)

    def observe(self, state: SurgeState, new: Measurement) -> tuple[SurgeState, int | None]:
        """Take a measurement, and return the new state and the step of the surge, if there is one.

        Among the measurements that are smoothed together, the first one that reaches the threshold itself gives the step, so
        smoothing does not delay the step.

        Args:
            state: State before.
            new: The measurement.
        """
        state = self._remember(state, new)
        recent = state.history[-self.smoothing :]
        if state.baseline is None:
            return state, None
        threshold = self.threshold(state.baseline)
        reaching = [m.step for m in recent if m.value >= threshold]
        if threshold > 0 and median(m.value for m in recent) >= threshold:
            return state, reaching[0]
        cut = [m.truncated for m in recent if m.truncated is not None]
        if state.truncated_baseline is not None and len(cut) == len(recent):
            threshold = self.truncated_threshold(state.truncated_baseline)
            reaching = [m.step for m, fraction in zip(recent, cut, strict=True) if fraction >= threshold]
            if median(cut) >= threshold:
                return state, reaching[0]
        return state, None

    def _remember(self, state: SurgeState, new: Measurement) -> SurgeState:
        history = (*state.history, new)
        if state.baseline is not None:
            return dataclasses.replace(state, history=history[-self.smoothing :])
        if len(history) < self.config.baseline_window:
            return dataclasses.replace(state, history=history)
        cut = [m.truncated for m in history if m.truncated is not None]
        return SurgeState(
            history=history[-self.smoothing :],
            baseline=Level.of([m.value for m in history]),
            truncated_baseline=Level.of(cut) if self.counts_truncated and cut else None,
        )
