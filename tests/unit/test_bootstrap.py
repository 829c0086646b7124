"""Intervals of ratios: they cover as often as they say, and they see whole sequences."""

from __future__ import annotations

from examples.bootstrap import Interval, bootstrap_ratio


def test_value_and_ends_by_hand() -> None:
    # Two sequences: a draw holds the first twice, both, or the second twice, with probabilities 1/4, 1/2 and 1/4.
    found = bootstrap_ratio([1.0, 3.0], [1.0, 1.0], level=0.4, resamples=1000)
    assert found == Interval(value=2.0, low=2.0, high=2.0, level=0.4, sequences=2)
    wide = bootstrap_ratio([1.0, 3.0], [1.0, 1.0], level=0.9, resamples=1000)
    assert (wide.low, wide.high) == (1.0, 3.0)
