"""Learning-rate control: lowers the rate when responses (or another statistic) grow, on top of the host's own schedule."""

from mismatch_ext.config import LrConfig
from mismatch_ext.lr.control import LrControl
from mismatch_ext.lr.controller import LrController
from mismatch_ext.lr.rate import RateControl
from mismatch_ext.lr.state import LrState
from mismatch_ext.lr.statistics import (
    LengthStatistics,
    gap_statistics,
    leading_statistics,
    length_statistics,
    numerics_statistics,
)

__all__ = [
    "LengthStatistics",
    "LrConfig",
    "LrControl",
    "LrController",
    "LrState",
    "RateControl",
    "gap_statistics",
    "leading_statistics",
    "length_statistics",
    "numerics_statistics",
]
