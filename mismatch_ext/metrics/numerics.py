"""Arithmetic on log-ratios that is accurate for tiny differences and finite for huge ones."""

from __future__ import annotations

import torch
from torch import Tensor

from mismatch_ext.errors import RecordError

# Largest exponent; larger log-ratios are cut and counted. exp(600) is 4e260, so a sum over 1e47 tokens still fits float64;
# with exp(700), the sum would overflow at the 18,000th token.
SATURATION = 600.0
# In float64, expm1(d) - d keeps a relative accuracy of 1e-10 down to this d; below it, two terms of the series are better.
SERIES_BELOW = 1e-5


def as_bool(name: str, mask: Tensor) -> Tensor:
    """Return a mask of zeros and ones as booleans, in the same shape.

    Args:
        name: The caller's name for the mask, used in messages.
        mask: Any dtype; a boolean mask is returned as it is.

    Raises:
        RecordError: The mask holds other values: they look like weights, and would all count as 1.
    """
    if mask.dtype == torch.bool:
        return mask
    kept = mask != 0
    if not torch.equal(kept.to(mask.dtype), mask):
        raise RecordError(f"{name} holds values other than 0 and 1; weights belong in the loss, not here.")
    return kept


def output_dtype(*tensors: Tensor) -> torch.dtype:
    """Return float64 if one of the tensors is, otherwise float32."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def k3(log_ratio: Tensor) -> Tensor:
    """Return the k3 estimate exp(d) - 1 - d of each log-ratio (Schulman 2020).

    `exp(d) - 1 - d` in float32 has an error of 100 % at d = 1e-4, a typical value in a float16 run. This function computes
    `expm1(d) - d` in float64, or d^2/2 + d^3/6 where that still cancels. Beyond `SATURATION` the exponential saturates.

    Args:
        log_ratio: d, any shape, float64.

    Returns:
        k3, same shape, float64, never negative, always finite.
    """
    direct = torch.expm1(log_ratio.clamp(max=SATURATION)).sub_(log_ratio)
    series = log_ratio * log_ratio * (0.5 + log_ratio / 6)
    return torch.where(log_ratio.abs() < SERIES_BELOW, series, direct)
