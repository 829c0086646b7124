"""Confidence intervals of a measured ratio: percentile intervals of the bootstrap over sequences.

Tokens of one response depend on each other, so whole sequences are drawn again, not tokens (the cluster bootstrap, Davison and
Hinkley 1997, section 3.8). The inputs are sums per sequence: of |Δlogp|, of k3, of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
# Resamples that are held at once: the drawn indices of 64 x 10,000 sequences are 5 MB.
CHUNK = 64


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A ratio and its confidence interval.

    Args:
        value: The ratio over all sequences.
        low: Lower end of the interval.
        high: Upper end of the interval.
        level: Confidence level: intended probability that the interval contains the true ratio, in (0, 1).
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

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON-able data."""
        return {
            "value": self.value,
            "low": self.low,
            "high": self.high,
            "level": self.level,
            "sequences": self.sequences,
        }


def bootstrap_ratio(
    numerator: Sequence[float] | Array,
    denominator: Sequence[float] | Array,
    *,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
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

    Raises:
        ValueError: Fewer than 2 sequences, lengths differ, a value is not finite, the denominator is not above 0, or an option
            is out of range.
    """
    top, bottom = _checked(numerator, denominator, level, resamples)
    return _interval(_ratio(top, bottom), _resampled(top, bottom, resamples, seed), level, len(top))


def bootstrap_quotient(
    first: tuple[Sequence[float] | Array, Sequence[float] | Array],
    second: tuple[Sequence[float] | Array, Sequence[float] | Array],
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

    Raises:
        ValueError: As for `bootstrap_ratio`, or the second mean is 0.
    """
    checked = [_checked(*sample, level, resamples) for sample in (first, second)]
    if not checked[1][0].sum():
        raise ValueError("the second mean is 0; there is no ratio to it.")
    values = [_ratio(*sample) for sample in checked]
    drawn = [_resampled(*sample, resamples, seed + at) for at, sample in enumerate(checked)]
    with np.errstate(divide="ignore"):
        ratios = drawn[0] / drawn[1]
    return _interval(values[0] / values[1], ratios, level, min(len(sample[0]) for sample in checked))


def _checked(numerator: Any, denominator: Any, level: float, resamples: int) -> tuple[Array, Array]:
    top, bottom = (np.asarray(values, dtype=np.float64) for values in (numerator, denominator))
    if top.ndim != 1 or top.shape != bottom.shape or len(top) < 2:
        raise ValueError(
            f"numerator {top.shape} and denominator {bottom.shape} must have one length: a value for each of 2 or more sequences."
        )
    for name, values in (("numerator", top), ("denominator", bottom)):
        if not np.isfinite(values).all():
            row = int(np.flatnonzero(~np.isfinite(values))[0])
            raise ValueError(f"{name}[{row}] is {values[row]}; every value must be finite.")
    if bottom.sum() <= 0:
        raise ValueError(f"the denominator's sum is {bottom.sum()}; it must be above 0.")
    if not 0 < level < 1:
        raise ValueError(f"level={level} must lie between 0 and 1.")
    if resamples < 100:
        raise ValueError(f"resamples={resamples} must be at least 100.")
    return top, bottom


def _ratio(top: Array, bottom: Array) -> float:
    return float(top.sum() / bottom.sum())


def _resampled(top: Array, bottom: Array, resamples: int, seed: int) -> Array:
    """Return the ratio of each resample: as many sequences as there are, drawn with replacement."""
    generator, count = np.random.default_rng(seed), len(top)
    both = np.stack([top, bottom], axis=1)
    parts = []
    for first in range(0, resamples, CHUNK):
        rows = generator.integers(count, size=(min(CHUNK, resamples - first), count))
        parts.append(both[rows].sum(axis=1))
    sums = np.concatenate(parts)
    with np.errstate(divide="ignore", invalid="ignore"):
        # If a draw's denominator is 0, the draw says nothing about the ratio; infinity keeps it from lowering the upper end.
        ratios = np.where(sums[:, 1] > 0, sums[:, 0] / sums[:, 1], np.inf)
    return np.asarray(ratios, dtype=np.float64)


def _interval(value: float, ratios: Array, level: float, sequences: int) -> Interval:
    # This method returns draws as percentiles: interpolation next to an infinite draw would give nan.
    low, high = np.quantile(ratios, [(1 - level) / 2, (1 + level) / 2], method="closest_observation")
    return Interval(value=value, low=float(low), high=float(high), level=level, sequences=sequences)
