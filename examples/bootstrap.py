"""Confidence intervals of a measured ratio: percentile intervals of the bootstrap over sequences.

Tokens of one response depend on each other, so whole sequences are drawn again, not tokens (the cluster bootstrap, Davison and
Hinkley 1997, section 3.8). The inputs are sums per sequence: of |Δlogp|, of k3, of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Values = Sequence[float] | Array
CHUNK = 64
"""Resamples that are held at once: the drawn indices of 64 x 10,000 sequences are 5 MB."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A ratio and its confidence interval.

    Args:
        value: The ratio over all sequences.
        low: Lower end of the interval.
        high: Upper end of the interval.
        level: Confidence level, in (0, 1).
        sequences: Number of sequences that were drawn from; for two samples, the number in the smaller one.
    """

    value: float
    low: float
    high: float
    level: float
    sequences: int

    def __format__(self, digits: str) -> str:
        """Return the ratio with its interval, each in the given format: `8.4 (8.2 to 8.6)`."""
        return f"{self.value:{digits}} ({self.low:{digits}} to {self.high:{digits}})"


def bootstrap_ratio(
    numerator: Values, denominator: Values, *, level: float = 0.95, resamples: int = 2000, seed: int = 0
) -> Interval:
    """Return sum(numerator) / sum(denominator) over the same sequences, for example a mean per token.

    Another example is the share of the gap that is left with replay.

    Args:
        numerator: A sum per sequence `[N]`, for example of |Δlogp| in nats, or of k3 with replay.
        denominator: A sum per sequence `[N]`, for example its number of tokens, or k3 without replay.
        level: Confidence level of the interval, in (0, 1).
        resamples: Draws of N sequences with replacement.
        seed: Seed of the draws: the same arguments give the same interval.

    Returns:
        The ratio, and the percentiles (1 - level) / 2 and (1 + level) / 2 of the resampled ratios.
    """
    ratio, drawn = _resampled(numerator, denominator, resamples, seed)
    return _interval(ratio, drawn, level, len(numerator))


def bootstrap_quotient(
    first: tuple[Values, Values],
    second: tuple[Values, Values],
    *,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """Return the ratio of two means per token from different samples, for example from a bf16 run and an FP16 run.

    Args:
        first: Sums per sequence, and numbers of tokens per sequence, of the first sample, `[N]` each.
        second: The same of the second sample, `[M]` each.
        level, resamples, seed: As for `bootstrap_ratio`; the two samples are drawn independently.

    Returns:
        (sum / tokens of the first) / (sum / tokens of the second), with its percentile interval.
    """
    (ratio, drawn), (other, other_drawn) = (
        _resampled(*sample, resamples, seed + at) for at, sample in enumerate((first, second))
    )
    with np.errstate(divide="ignore"):
        return _interval(ratio / other, drawn / other_drawn, level, min(len(first[0]), len(second[0])))


def _resampled(numerator: Values, denominator: Values, resamples: int, seed: int) -> tuple[float, Array]:
    """Return the ratio, and that of each resample: as many sequences as there are, drawn with replacement."""
    both = np.stack([np.asarray(numerator, dtype=np.float64), np.asarray(denominator, dtype=np.float64)], axis=1)
    generator, count = np.random.default_rng(seed), len(both)
    parts = []
    for first in range(0, resamples, CHUNK):
        rows = generator.integers(count, size=(min(CHUNK, resamples - first), count))
        parts.append(both[rows].sum(axis=1))
    sums = np.concatenate(parts)
    with np.errstate(divide="ignore", invalid="ignore"):
        # If a draw's denominator is 0, the draw says nothing about the ratio; infinity keeps it from lowering the upper end.
        ratios = np.where(sums[:, 1] > 0, sums[:, 0] / sums[:, 1], np.inf)
    top, bottom = both.sum(0)
    return float(top / bottom), ratios


def _interval(value: float, ratios: Array, level: float, sequences: int) -> Interval:
    # This method returns draws as percentiles: interpolation next to an infinite draw would give nan.
    low, high = np.quantile(ratios, [(1 - level) / 2, (1 + level) / 2], method="closest_observation")
    return Interval(value=value, low=float(low), high=float(high), level=level, sequences=sequences)
