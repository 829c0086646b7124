"""Where the end of a series left the level of what came before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from mismatch_ext.alarms import PATIENCE

FAR_ABOVE = 3.0
"""Medians of a few batches whose sizes have a heavy tail differ by a factor of 2 by chance. A choice."""
RISEN = 1.5
"""A rise begins where the median of three values is above the level before by this factor. A choice."""


@dataclass(frozen=True, kw_only=True)
class ChangePoint:
    """A rise that lasts to the end: the index of its first value, and the medians before it and from it on."""

    index: int
    before: float
    after: float


def change_point(sizes: Sequence[float], least: float) -> ChangePoint | None:
    """Find where the end of a series rose far above what came before it; None if it did not.

    The end is the last three values, or the last tenth if that is more. It is far above if its median is `FAR_ABOVE` times the
    median of the values before.

    Args:
        sizes: Positive sizes in order of time.
        least: Sizes up to this one never count as a rise.
    """
    window = _window_far_above(sizes, least)
    if window is None:
        return None
    before = median(sizes[:-window])
    far, risen = _limit(before, FAR_ABOVE, least), _limit(before, RISEN, least)

    first_far = next(at for at in range(len(sizes) - window, len(sizes)) if sizes[at] > far)
    first_far = _first_of_streak(sizes, first_far, far)

    # The rise may have begun more slowly, with values that are not far above yet.
    begin = first_far
    while begin >= PATIENCE and median(sizes[begin - PATIENCE : begin]) > risen:
        begin -= 1
    begin = _first_of_streak(sizes, begin, risen)

    # What rises to a plateau and leaves it much later is two changes, and the second is the one to look at.
    index = begin if median(sizes[begin:]) > far else first_far
    return ChangePoint(index=index, before=before, after=median(sizes[index:]))


def _window_far_above(sizes: Sequence[float], least: float) -> int | None:
    """Return the length of an end that is far above what came before it."""
    for window in (PATIENCE, max(PATIENCE, len(sizes) // 10)):
        if len(sizes) < 2 * window:
            return None
        limit = _limit(median(sizes[:-window]), FAR_ABOVE, least)
        if median(sizes[-window:]) > limit:
            return window
    return None


def _limit(level: float, factor: float, least: float) -> float:
    return max(least, factor * level)


def _first_of_streak(sizes: Sequence[float], at: int, limit: float) -> int:
    """Go back from an index as long as the value before is above a limit."""
    while at > 0 and sizes[at - 1] > limit:
        at -= 1
    return at
