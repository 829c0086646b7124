"""Master weights spread inside the cells of the engine's storage grid, so that small updates reach the engine."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

INSIDE = 0.98
"""Part of a cell that noise fills, because a value on the border may be rounded into the next cell."""


@dataclass(frozen=True)
class FloatCells:
    """The grid of a float dtype: the cell of a stored value contains all master weights that the engine stores as that value.

    Args:
        dtype: Dtype in which the engine stores weights.
    """

    dtype: torch.dtype

    def held(self, weight: Tensor) -> Tensor:
        """Return the values that an engine stores for master weights, in the masters' dtype."""
        return weight.to(self.dtype).to(weight.dtype)

    def width(self, weight: Tensor) -> Tensor:
        """Return twice the distance from each stored value to the nearer border of its cell; 0 where a weight must not change."""
        info = torch.finfo(self.dtype)
        mantissa, exponent = torch.frexp(weight.to(torch.float64))
        width = torch.ldexp(torch.full_like(mantissa, info.eps), exponent - 1).clamp(min=info.tiny * info.eps)
        # Just below a power of two, values are twice as dense as just above it.
        width = torch.where(mantissa.abs() == 0.5, width / 2, width)
        return width.masked_fill(weight == 0, 0.0).to(weight.dtype)


@dataclass(frozen=True)
class IntegerCells:
    """The grid of signed integers with one scale per row, which the row's largest entry determines.

    Args:
        bits: Bits of an integer.
    """

    bits: int

    def held(self, weight: Tensor) -> Tensor:
        """As `FloatCells.held`."""
        return (weight / self.step(weight)).round() * self.step(weight)

    def width(self, weight: Tensor) -> Tensor:
        """As `FloatCells.width`; the largest entry must stay, because it determines the scale of its whole row."""
        largest = weight.abs() >= weight.abs().amax(-1, keepdim=True) * (1 - 1e-3)
        return self.step(weight).expand_as(weight).masked_fill(largest, 0.0)

    def step(self, weight: Tensor) -> Tensor:
        """Return the distance of two neighbors on the grid, per row."""
        step: Tensor = weight.abs().amax(-1, keepdim=True).clamp(min=1e-9) / (2 ** (self.bits - 1) - 1)
        return step


def dither(weight: Tensor, cells: FloatCells | IntegerCells, generator: torch.Generator | None = None) -> Tensor:
    """Return master weights spread evenly inside their cells; the engine stores the same weights as before, to the last bit.

    A checkpoint that was published in an engine's storage format lies on the engine's grid. Updates of less than half a grid
    step then change none of the engine's weights. After spreading, master weights cross the borders of their cells one after
    another, like those of a checkpoint that was never rounded (docs/stability.md).

    Args:
        weight: Master weights, float32 or float64, any shape; the last dimension runs along a row.
        cells: The grid on which the engine stores them.
        generator: Generator of the noise; None takes torch's default.

    Returns:
        A new tensor of the same shape and dtype. Weights that are not on a grid point stay as they are.

    Raises:
        ValueError: The dtype of the master weights is too coarse for noise.
    """
    if weight.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"dither: masters of {weight.dtype} have no values between those that an engine stores; keep masters in float32."
        )
    held = cells.held(weight)
    noise = torch.rand(weight.shape, generator=generator, device=weight.device, dtype=weight.dtype) - 0.5
    spread = torch.where(held == weight, weight + INSIDE * noise * cells.width(weight), weight)
    return torch.where(cells.held(spread) == held, spread, weight)
