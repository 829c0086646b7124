"""The learning-rate rule once more, from docs/lr.md: the surge by statistics.median, the multiplier by the step alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

LEAST = {"response_length": 1.0, "mismatch_kl": 1e-3, "grad_norm": 0.0, "f_tau": 0.01}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The settings of a rule, in the words of the `lr` section."""

    trigger: str
    decay: float
    floor: float
    period: int | None
    surge_ratio: float
    baseline_window: int
    warmup_steps: int


@dataclass
class Rule:
    """Measurements so far, as (step, value, truncated fraction or None), and the step of the surge."""

    asked: Asked
    measurements: list[tuple[int, float, float | None]] = field(default_factory=list)
    surge: int | None = None

    def measure(self, step: int, value: float, truncated: float | None) -> None:
        if self.asked.period is not None or self.surge is not None:
            return
        if self.measurements and self.measurements[-1][0] == step:
            return  # only the first measurement of a step counts
        self.measurements.append((step, value, truncated))
        self.surge = self.found()

    def found(self) -> int | None:
        window = self.asked.baseline_window
        if len(self.measurements) < window:
            return None
        first, recent = self.measurements[:window], self.measurements[-min(5, window) :]
        center, spread = robust([value for _, value, _ in first])
        threshold = max(self.asked.surge_ratio * center, center + 4 * spread, LEAST[self.asked.trigger])
        if threshold > 0 and median(value for _, value, _ in recent) >= threshold:
            return next(step for step, value, _ in recent if value >= threshold)
        known = [cut for _, _, cut in first if cut is not None]
        if self.asked.trigger != "response_length" or not known or any(cut is None for _, _, cut in recent):
            return None
        center, spread = robust(known)
        threshold = center + max(0.5, 4 * spread)
        cuts = [(step, cut) for step, _, cut in recent if cut is not None]
        if median(cut for _, cut in cuts) >= threshold:
            return next(step for step, cut in cuts if cut >= threshold)
        return None

    def multiplier(self, step: int) -> float:
        period = self.asked.period
        if period is None:
            if self.surge is None:
                return 1.0
            period = max(1, round(1.8 * self.surge))
        return max(self.asked.decay ** (max(step - self.asked.warmup_steps, 0) // period), self.asked.floor)


def robust(values: list[float]) -> tuple[float, float]:
    """Return the median and the robust standard deviation."""
    center = median(values)
    return center, 1.4826 * median(abs(value - center) for value in values)
