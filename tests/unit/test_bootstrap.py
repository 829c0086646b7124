"""Intervals of ratios: they cover as often as they say, and they see whole sequences."""

from __future__ import annotations

import numpy as np

from examples.bootstrap import Interval, bootstrap_ratio


def responses(rng: np.random.Generator, count: int, mean: float) -> tuple[np.ndarray, np.ndarray]:
    """Draw sums and tokens of responses whose tokens share a heavy-tailed level, so that they depend on each other."""
    tokens = rng.integers(5, 60, size=count).astype(float)
    level = rng.lognormal(mean=-0.5, sigma=1.0, size=count)  # of mean 1
    noise = rng.gamma(shape=tokens, scale=1.0) / tokens
    return mean * level * noise * tokens, tokens


def test_the_interval_of_a_mean_covers_it_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    hits = 0
    for seed in range(200):
        sums, tokens = responses(rng, 300, mean=2.0)
        found = bootstrap_ratio(sums, tokens, resamples=400, seed=seed)
        hits += found.low <= 2.0 <= found.high
    # 95 % of 200 is 190; percentile intervals of skewed data cover a little less, and 4 binomial deviations are 12.
    assert 174 <= hits < 200


def test_value_and_ends_by_hand() -> None:
    # Two sequences: a draw holds the first twice, both, or the second twice, with probabilities 1/4, 1/2 and 1/4.
    found = bootstrap_ratio([1.0, 3.0], [1.0, 1.0], level=0.4, resamples=1000)
    assert found == Interval(value=2.0, low=2.0, high=2.0, level=0.4, sequences=2)
    wide = bootstrap_ratio([1.0, 3.0], [1.0, 1.0], level=0.9, resamples=1000)
    assert (wide.low, wide.high) == (1.0, 3.0)
