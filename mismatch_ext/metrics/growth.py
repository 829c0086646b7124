"""How fast a positive measure grows over the steps of a run, with an interval that is robust against heavy tails.

The slope is that of Theil and Sen: the median of (log y_j - log y_i) / (x_j - x_i) over all pairs of logs. Its interval is Sen's
(1968), from the variance of Kendall's statistic without growth. If the policy drifts, successive batches are similar, which makes
that variance larger. It is therefore multiplied by (1 + r) / (1 - r), where r is the correlation of the residuals' ranks with the
ranks one log earlier.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mismatch_ext.errors import RecordError

WINDOW = 48
"""The slope is computed from this many logs, the last ones."""
LEAST = 16
"""Least number of logs for a slope."""
FLOOR = 1e-4
"""Smaller values of k3 count as this value, a tenth of the alarm's level: growth below it has no consequence."""
QUANTILE = 2.576
"""Quantile of the standard normal distribution for an interval of 99 %."""
LARGEST_EXPONENT = 700.0
GROWTH_MEASURES = {
    "k3_growth": f"factor by which `k3_kl` has grown over the last {WINDOW} logs, by the median slope of its logarithm; values "
    f"below {FLOOR:g} count as that",
    "k3_growth_low": "lower end of its 99 % interval; above 1 it grows",
}
"""Metrics of the growth of the gap, by name without prefix; logged from the 16th log on."""


def slope(steps: Sequence[float], values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median slope of values over steps, and both ends of its 99 % interval.

    Args:
        steps: Step of each value, ascending.
        values: At least two values.
    """
    x, y = np.asarray(steps, np.float64), np.asarray(values, np.float64)
    count = len(x)
    i, j = np.triu_indices(count, 1)
    slopes = np.sort((y[j] - y[i]) / (x[j] - x[i]))
    middle = float(np.median(slopes))
    residuals = y - middle * x
    ranks = (residuals[:, None] > residuals).sum(1) + ((residuals[:, None] == residuals).sum(1) - 1) / 2
    ranks = ranks - ranks.mean()
    total = float((ranks * ranks).sum())
    alike = max(0.0, float((ranks[1:] * ranks[:-1]).sum()) / total) if total > 0 else 0.0
    spread = math.sqrt(count * (count - 1) * (2 * count + 5) / 18 * (1 + alike) / max(1 - alike, 1e-9))
    beyond = math.floor((len(slopes) - QUANTILE * spread) / 2)
    if beyond < 0:
        return middle, -math.inf, math.inf
    return middle, float(slopes[beyond]), float(slopes[len(slopes) - 1 - beyond])


class Growth:
    """Follows k3 over the logs of a run; keeps the last ones."""

    def __init__(self) -> None:
        self._points: list[tuple[int, float]] = []

    def add(self, step: int, k3: float) -> dict[str, float]:
        """Add the value of a log, and return the scalars of `GROWTH_MEASURES`; empty until there are enough logs.

        Args:
            step: Finished optimizer steps. A second log of a step is ignored; a smaller step starts the record again.
            k3: The gap; a value that is not finite is ignored.
        """
        if self._points and step < self._points[-1][0]:
            self._points = []
        if math.isfinite(k3) and (not self._points or step > self._points[-1][0]):
            self._points = [*self._points, (step, math.log(max(k3, FLOOR)))][-WINDOW:]
        if len(self._points) < LEAST:
            return {}
        steps, values = zip(*self._points, strict=True)
        span = steps[-1] - steps[0]
        middle, low, _ = (math.exp(min(found * span, LARGEST_EXPONENT)) for found in slope(steps, values))
        return {"k3_growth": middle, "k3_growth_low": low}

    def state_dict(self) -> list[list[float]]:
        """Return the kept logs as JSON-able data."""
        return [[step, value] for step, value in self._points]

    def load_state_dict(self, state: Any) -> None:
        """Go on from a state of `state_dict`; None, from a release that did not follow growth, starts with no logs.

        Raises:
            RecordError: The state is damaged.
        """
        points = [] if state is None else state
        try:
            found = [(int(step), float(value)) for step, value in points]
            good = not isinstance(points, Mapping) and all(math.isfinite(value) for _, value in found)
        except (TypeError, ValueError, OverflowError):
            good = False
        if not good or any(a[0] >= b[0] for a, b in zip(found, found[1:], strict=False)):
            raise RecordError(
                f"the state of the gap's growth is damaged: {state!r}; expected pairs of a rising step and a finite number. "
                "Resume from another checkpoint."
            )
        self._points = found[-WINDOW:]
