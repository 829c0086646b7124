"""How large a gap is, in words, and the thresholds that this rests on.

Thresholds on the mean |log-probability difference| per token (nat) and on k3 (nats per token), besides those of
`mismatch_ext.alarms`:

    SAME_ABS_DIFF     1e-4  float32 on both sides leaves 1e-7 to 1e-5 on the models this package is tested
                            with; ten times that is still rounding, and a plumbing error is far above it.
    HEALTHY_ABS_DIFF  0.02  TRL issue #5312: 0.010 to 0.018 in healthy bfloat16 runs.
    LARGE_K3          1e-2  The tinker cookbook asks for a KL (v1) below 0.01.

The size of a gap says little without the model's own rounding. Where the doctor has measured that, a gap that it calls clean is
small, and one of `ROUNDINGS` times the rounding is not.
"""

from __future__ import annotations

import math

from mismatch_ext.alarms import HEALTHY_K3, STALE_ABS_DIFF

SAME_ABS_DIFF = 1e-4
HEALTHY_ABS_DIFF = 0.02
LARGE_K3 = 1e-2
ROUNDINGS = 3.0
CLEAR_RATIO = 2.0
"""From this ratio between two gaps on, one is called larger. A choice."""

SAME, SMALL, WARNED, ELEVATED, CAUSED, LARGE = "same", "small", "warned", "elevated", "caused", "large"
UNKNOWN, MIXED = "unknown", "mixed"
LEVELS = (SAME, SMALL, WARNED, ELEVATED, CAUSED, LARGE)
"""Levels of a gap that was measured, the smallest first."""
WORDS = {
    SAME: ("same policy", "computes the same policy on both sides", "compute the same policy on both sides"),
    SMALL: ("small gap", "has a small gap", "have a small gap"),
    WARNED: (
        "small gap, with warnings",
        "has a small gap, with warnings",
        "have a small gap, with warnings",
    ),
    ELEVATED: (
        "elevated gap",
        "has a gap above what healthy runs report",
        "have a gap above what healthy runs report",
    ),
    CAUSED: ("known cause", "has a gap with a known cause", "have a gap with a known cause"),
    LARGE: ("large gap", "has a gap as large as stale weights cause", "have a gap as large as stale weights cause"),
    UNKNOWN: ("not measured", "recorded no mismatch metrics", "recorded no mismatch metrics"),
    MIXED: (
        "numerics unknown",
        "has stale rollouts and no token of one version, so that numerics and drift cannot be told apart",
        "have stale rollouts and no token of one version, so that numerics and drift cannot be told apart",
    ),
}
"""Level -> its label, and what it says of one run and of several."""


def level_of(abs_diff_mean: float | None, k3: float | None) -> str:
    """Return same, small, elevated or large for a mean |Δlogp| and a k3; unknown without either, never same by k3 alone."""
    if abs_diff_mean is None and k3 is None:
        return UNKNOWN
    if abs_diff_mean is not None and abs_diff_mean <= SAME_ABS_DIFF:
        return SAME
    # Stock verl logs k3 alone, in float32, where the k3 of a gap that small is 0 or rounding.
    kl = max(k3 or 0.0, 0.0)
    if abs_diff_mean is None:
        abs_diff_mean = mean_of_k3(kl)
    if abs_diff_mean >= STALE_ABS_DIFF or kl >= LARGE_K3:
        return LARGE
    return ELEVATED if abs_diff_mean > HEALTHY_ABS_DIFF or kl > HEALTHY_K3 else SMALL


def at_least(level: str, least: str) -> str:
    """Return the larger of two levels of a gap that was measured."""
    return max(level, least, key=LEVELS.index)


def mean_of_k3(k3: float) -> float:
    """Return the mean size of normally distributed differences with this k3, which is pi/4 times its square."""
    return math.sqrt(max(k3, 0.0) * 4 / math.pi)
