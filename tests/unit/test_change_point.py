"""Where the end of a series left the level of what came before it, against series whose step is known."""

from __future__ import annotations

import math
import random

import pytest

from mismatch_ext.report.change_point import change_point


@pytest.mark.parametrize("length", [6, 500])
@pytest.mark.parametrize("late", [3, 0.5])
def test_a_jump_is_found_at_its_first_value(length: int, late: float) -> None:
    at = length - max(3, round(late * length) if late < 1 else int(late))
    found = change_point([1.0] * at + [4.0] * (length - at), 0.0)
    assert found is not None
    assert (found.index, found.before, found.after) == (at, 1.0, 4.0)


@pytest.mark.parametrize(
    "sizes",
    [
        [1.0] * 3 + [9.0] * 2,  # too short
        [1.0] * 50 + [9.0] * 20 + [1.0] * 50,  # is over
        [1.0] * 50 + [9.0],  # may be an outlier
        [9.0] * 50 + [1.0] * 50,
    ],
)
def test_what_does_not_last_to_the_end_or_is_no_rise_is_not_found(sizes: list[float]) -> None:
    assert change_point(sizes, 0.0) is None


def test_noise_of_a_batch_is_rarely_a_rise_and_a_rise_in_noise_is_found_near_its_step() -> None:
    noise = random.Random(0)
    heavy = [[math.exp(noise.gauss(0, 0.3)) for _ in range(100)] for _ in range(300)]
    assert sum(change_point(sizes, 0.0) is not None for sizes in heavy) <= 3
    risen = [change_point(sizes[:80] + [5 * size for size in sizes[80:]], 0.0) for sizes in heavy]
    places = [found.index for found in risen if found is not None]
    assert len(places) == len(heavy)
    assert sum(abs(place - 80) <= 3 for place in places) >= 0.95 * len(heavy)


@pytest.mark.parametrize(
    ("sizes", "index"),
    [([0.005] * 100 + [0.008] * 60 + [0.21] * 5, 160), ([0.004] * 60 + [0.007] * 30 + [0.03] * 4, 90)],
)
def test_a_plateau_before_a_jump_is_not_its_beginning(sizes: list[float], index: int) -> None:
    found = change_point(sizes, 0.0)
    assert found is not None and found.index == index
