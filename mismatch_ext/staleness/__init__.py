"""Rollouts of older weights: which version sampled each token, and how much of the gap is drift, not numerics."""

from mismatch_ext.staleness.gap import SOURCES, Source, StaleGap
from mismatch_ext.staleness.versions import (
    UNKNOWN,
    Segment,
    of_one_version,
    segments_of_span,
    staleness,
    token_versions,
)

__all__ = [
    "SOURCES",
    "UNKNOWN",
    "Segment",
    "Source",
    "StaleGap",
    "of_one_version",
    "segments_of_span",
    "staleness",
    "token_versions",
]
