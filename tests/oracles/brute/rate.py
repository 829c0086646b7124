"""The learning rate's multiplier, from all statistics so far, by the rule in the docstrings of `mismatch_ext.lr`."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

Seen = tuple[int, float, float | None]
"""Step, statistic and truncated fraction of a batch."""
LEAST = {"response_length": 1.0, "mismatch_kl": 1e-3, "grad_norm": 0.0, "f_tau": 0.01}


@dataclass(kw_only=True)
class Rule:
    """The `lr` section in force; `period` None waits for a surge."""

    period: int | None
    decay: float
    floor: float
    trigger: str
    surge_ratio: float
    window: int
    warmup: int
    seen: list[Seen] = field(default_factory=list)
    surge: int | None = None

    def see(self, step: int, statistic: float, truncated: float | None) -> None:
        """Take a batch's statistics; after the surge none is looked at."""
        if self.period is None and self.surge is None:
            self.seen.append((step, statistic, truncated))
            self.surge = self._surge()

    def multiplier(self, step: int) -> float:
        period = self.period
        if period is None:
            if self.surge is None:
                return 1.0
            period = max(1, round(1.8 * self.surge))
        multiplier = 1.0
        for _ in range(max(step - self.warmup, 0) // period):
            multiplier = max(multiplier * self.decay, self.floor)
        return multiplier

    def _surge(self) -> int | None:
        """Return the first of the recent batches that reaches the threshold which their median reaches."""
        if len(self.seen) < self.window:
            return None
        first, recent = self.seen[: self.window], self.seen[-min(5, self.window) :]
        center, spread = level([value for _, value, _ in first])
        threshold = max(self.surge_ratio * center, center + 4 * spread, LEAST[self.trigger])
        if threshold > 0 and median(value for _, value, _ in recent) >= threshold:
            return next(step for step, value, _ in recent if value >= threshold)
        if self.trigger == "response_length" and all(cut is not None for *_, cut in self.seen):
            center, spread = level([cut or 0.0 for *_, cut in first])
            threshold = center + max(0.5, 4 * spread)
            if median(cut or 0.0 for *_, cut in recent) >= threshold:
                return next(step for step, _, cut in recent if (cut or 0.0) >= threshold)
        return None


def level(values: list[float]) -> tuple[float, float]:
    """Return the median, and the standard deviation that the median absolute deviation stands for."""
    center = median(values)
    return center, 1.4826 * median(abs(value - center) for value in values)
