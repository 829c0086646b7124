"""Arithmetic on log-ratios that is right for tiny differences and finite for huge ones."""

from __future__ import annotations

import torch
from torch import Tensor

# Largest exponent that is exponentiated; exp(700) is 1e304, just inside float64. Log-ratios beyond it are counted.
SATURATION = 700.0
# Below this, expm1(d) - d loses digits to cancellation and its series is exact to the last bit instead.
SERIES_BELOW = 1e-2


def k3(log_ratio: Tensor) -> Tensor:
    """Return the k3 estimate exp(d) - 1 - d of each log-ratio (Schulman 2020).

    `exp(d) - 1 - d` in float32 has an error of 100 % at d = 1e-4, where a float16 run lives. Here the series
    d^2/2 + d^3/6 + ... is summed for small d, in float64. Beyond `SATURATION` the exponential saturates.

    Args:
        log_ratio: d, any shape, float64.

    Returns:
        k3, same shape, float64, never negative, always finite.
    """
    small = log_ratio.abs() < SERIES_BELOW
    # Horner form of d^2/2 (1 + d/3 (1 + d/4 (1 + d/5 (1 + d/6)))); the next term is below 1e-16 of the first.
    d = torch.where(small, log_ratio, torch.zeros_like(log_ratio))
    series = d * d / 2 * (1 + d / 3 * (1 + d / 4 * (1 + d / 5 * (1 + d / 6 * (1 + d / 7)))))
    return torch.where(small, series, torch.expm1(log_ratio.clamp(max=SATURATION)) - log_ratio)
