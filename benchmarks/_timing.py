"""Paired timing: ours and theirs run in turn, so that a machine that drifts affects both; returns medians and their ratio."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any


def paired(
    name: str,
    ours: Callable[[], Any],
    theirs: Callable[[], Any],
    *,
    equal: str,
    repeats: int = 15,
    wait: Callable[[], Any] = lambda: None,
) -> dict[str, Any]:
    """Time two functions in turn.

    Args:
        name: Name of the comparison.
        ours: Our function.
        theirs: The peer's.
        equal: Which of their results were found equal before this call.
        repeats: Number of runs of each.
        wait: Waits until work that a function only started, as on a GPU, is done.

    Returns:
        Medians in seconds, and theirs over ours pair by pair (median): above 1, ours is faster.
    """
    seconds: list[tuple[float, float]] = []
    ours(), theirs(), wait()
    for _ in range(repeats):
        times = []
        for function in (ours, theirs):
            start = time.perf_counter()
            function()
            wait()
            times.append(time.perf_counter() - start)
        seconds.append((times[0], times[1]))
    return {
        "name": name,
        "ours": median(a for a, _ in seconds),
        "theirs": median(b for _, b in seconds),
        "ratio": median(b / a for a, b in seconds),
        "equal": equal,
    }
