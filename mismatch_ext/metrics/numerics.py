"""Arithmetic on log-ratios that is right for tiny differences and finite for huge ones."""

from __future__ import annotations

import torch
from torch import Tensor

from mismatch_ext.errors import RecordError

# Largest exponent that is exponentiated; log-ratios beyond it are counted. exp(600) is 4e260, so that a sum over 1e47
# tokens still fits float64; exp(700) would overflow at the 18,000th.
SATURATION = 600.0
# In float64 expm1(d) - d keeps 1e-10 of relative accuracy down to here; two terms of the series are better below.
SERIES_BELOW = 1e-5


def as_bool(name: str, mask: Tensor) -> Tensor:
    """Return a mask of zeros and ones as one of booleans, of the same shape.

    Args:
        name: What it is called where it was given.
        mask: Any dtype; one of booleans is returned as it is.

    Raises:
        RecordError: It holds something else: weights, which would all count as 1.
    """
    if mask.dtype == torch.bool:
        return mask
    kept = mask != 0
    if not torch.equal(kept.to(mask.dtype), mask):
        raise RecordError(f"{name} holds values other than 0 and 1; weights belong in the loss, not here.")
    return kept


def k3(log_ratio: Tensor) -> Tensor:
    """Return the k3 estimate exp(d) - 1 - d of each log-ratio (Schulman 2020).

    `exp(d) - 1 - d` in float32 has an error of 100 % at d = 1e-4, where a float16 run lives. Here it is `expm1(d) - d`
    in float64, with d^2/2 + d^3/6 in its place where that still cancels. Beyond `SATURATION` the exponential saturates.

    Args:
        log_ratio: d, any shape, float64.

    Returns:
        k3, same shape, float64, never negative, always finite.
    """
    direct = torch.expm1(log_ratio.clamp(max=SATURATION)).sub_(log_ratio)
    series = log_ratio * log_ratio * (0.5 + log_ratio / 6)
    return torch.where(log_ratio.abs() < SERIES_BELOW, series, direct)
