"""Intervals of the benchmarks, against tables and enumeration."""

from __future__ import annotations

import math
import random

import pytest

from benchmarks.harness import interval, of_the_mean


# 97.5 % points of Student's t, of a printed table, by degrees of freedom.
@pytest.mark.parametrize(("degrees", "point"), [(1, 12.706), (4, 2.776), (9, 2.262), (29, 2.045), (60, 2.000)])
def test_the_interval_of_a_mean_is_students(degrees: int, point: float) -> None:
    draw = random.Random(degrees)
    values = [draw.gauss(3.0, 0.5) for _ in range(degrees + 1)]
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / degrees
    found, half = of_the_mean(values)
    assert found == pytest.approx(mean)
    assert half == pytest.approx(point * math.sqrt(variance / len(values)), rel=3e-4)


def test_one_value_has_no_interval() -> None:
    mean, half = of_the_mean([2.0])
    assert mean == 2.0 and math.isnan(half)


@pytest.mark.parametrize("count", [6, 9, 10, 17, 40])
def test_the_interval_of_a_median_leaves_it_out_with_at_most_5_percent(count: int) -> None:
    draw = random.Random(count)
    low, high = interval(draw.sample(range(count), count))
    # The values are their own places: the median is below the interval if at most `low` of them are below the median.
    outside = 2 * sum(math.comb(count, below) for below in range(int(low) + 1)) / 2**count
    closer = 2 * sum(math.comb(count, below) for below in range(int(low) + 2)) / 2**count
    assert low + high == count - 1
    assert outside <= 0.05 < closer


def test_of_few_values_the_interval_is_all_of_them() -> None:
    assert interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
