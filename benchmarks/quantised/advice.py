"""Bounds of a token's weight that keep a given share of tokens, and the level at which a sequence's weight is affordable."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist


def token_bound(*, sigma: float, mean: float = 0.0, keep: float, measured: Sequence[float] = ()) -> float:
    """Return x of the symmetric bounds (1/x, x) of a single ratio that keep a share of the tokens.

    Args:
        sigma: Standard deviation of log pi_old - log mu per token, nats.
        mean: Mean of the same difference, nats.
        keep: Share of tokens to keep.
        measured: Differences of sampled tokens, nats. If given, x is the quantile of these, not of a normal distribution,
            whose tail is too light for a quantised engine.
    """
    if measured:
        sizes = sorted(map(abs, measured))
        return math.exp(min(sizes[math.ceil(keep * len(sizes)) - 1], 700.0))
    return _bound(mean, sigma, keep)


def level(*, sigma: float, length: float, mean: float = 0.0, keep: float) -> str:
    """Return the level of weights to use, if the log-ratios of a response's tokens are independent and normal.

    The sum of log-ratios is then Normal(L mean, L sigma^2). The sequence's weight is unbiased, but useful only while truncation
    at 2 changes few of the weights.

    Args:
        sigma, mean, keep: As for `token_bound`.
        length: Mean number of tokens per response, L.
    """
    upper = _bound(length * mean, math.sqrt(length) * sigma, keep)
    return "sequence" if upper <= 2.0 else "token" if upper <= 10.0 else "geometric"


def _bound(mean: float, spread: float, keep: float) -> float:
    """Return x such that exp(Normal(mean, spread^2)) lies between 1/x and x with probability `keep`."""
    low, high = 0.0, abs(mean) + 40 * spread + 1e-12
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (low, middle) if _inside(mean, spread, middle) >= keep else (middle, high)
    return math.exp(min(high, 700.0))


def _inside(mean: float, spread: float, size: float) -> float:
    """Return the probability that Normal(mean, spread^2) lies within +-size."""
    if spread == 0:
        return float(abs(mean) <= size)
    normal = NormalDist(mean, spread)
    return 1 - (normal.cdf(-size) + (1 - normal.cdf(size)))
