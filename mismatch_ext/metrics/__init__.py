"""Measures of the gap between rollout and trainer log-probabilities."""

from mismatch_ext.metrics.accumulator import MismatchAccumulator, MismatchSummary, mismatch_metrics
from mismatch_ext.metrics.groups import GapGroups
from mismatch_ext.metrics.names import MEASURES, Measure
from mismatch_ext.metrics.profiles import Profile

__all__ = [
    "MEASURES",
    "GapGroups",
    "Measure",
    "MismatchAccumulator",
    "MismatchSummary",
    "Profile",
    "mismatch_metrics",
]
