"""How fast a gap grows over the logs of a run, by a slope that is robust against heavy tails."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mismatch_ext.states import state

GROWTH_WINDOW = 48
"""The growth is computed from this many logs, the last ones."""
GROWTH_LEAST = 16
"""Least number of logs for it."""
GROWTH_FLOOR = 1e-4
"""Smaller values of k3 count as this value, a tenth of the alarm's level: growth below it has no consequence."""
QUANTILE = 2.576
"""Quantile of the standard normal distribution for an interval of 99 %."""
LARGEST_EXPONENT = 700.0


@state
class Growth:
    """The last logs of a run: optimizer steps, rising, and the logarithm of a gap."""

    points: tuple[tuple[int, float], ...] = ()


def grown(growth: Growth, step: int, gap: float, name: str = "k3") -> tuple[Growth, dict[str, float]]:
    """Add a log's gap after `step` steps; return the logs, the factor by which it grew and the lower end of its 99 % interval.

    `name` begins the names of the two.
    """
    points = () if growth.points and step < growth.points[-1][0] else growth.points
    if math.isfinite(gap) and (not points or step > points[-1][0]):
        points = (*points, (step, math.log(max(gap, GROWTH_FLOOR))))[-GROWTH_WINDOW:]
    growth = Growth(points=points)
    if len(points) < GROWTH_LEAST:
        return growth, {}
    steps, values = zip(*points, strict=True)
    span = steps[-1] - steps[0]
    middle, low, _ = (math.exp(min(value * span, LARGEST_EXPONENT)) for value in slope(steps, values))
    return growth, {f"{name}_growth": middle, f"{name}_growth_low": low}


def slope(steps: Sequence[float], values: Sequence[float]) -> tuple[float, float, float]:
    """Return the slope of values over ascending steps, and both ends of its 99 % interval, robust against heavy tails.

    The median of (y_j - y_i) / (x_j - x_i) over all pairs (Theil and Sen), with Sen's interval (1968) from the variance of
    Kendall's statistic without growth. If the policy drifts, successive batches are similar, which makes that variance larger: it
    is multiplied by (1 + r) / (1 - r), where r is the correlation of the residuals' ranks with the ranks one log earlier.
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
