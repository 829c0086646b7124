"""Masters spread inside the cells of the grid that an engine stores weights on, so that small updates reach it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mismatch_ext.errors import ConfigError

INSIDE = 0.98
"""Part of a cell that noise fills: what lies on its border may be rounded to the next."""


class Cells(Protocol):
    """A grid: each stored value stands for the masters of a cell around it."""

    def held(self, weight: Tensor) -> Tensor:
        """Return what an engine holds of masters, in their own dtype."""

    def width(self, weight: Tensor) -> Tensor:
        """Return the width of each weight's cell, from its stored value to the nearer border twice; 0 where it must stay."""


@dataclass(frozen=True)
class FloatCells:
    """The values of a float dtype.

    Args:
        dtype: What the engine stores weights in.
    """

    dtype: torch.dtype

    def held(self, weight: Tensor) -> Tensor:
        return weight.to(self.dtype).to(weight.dtype)

    def width(self, weight: Tensor) -> Tensor:
        info = torch.finfo(self.dtype)
        mantissa, exponent = torch.frexp(weight.to(torch.float64))
        width = torch.ldexp(torch.full_like(mantissa, info.eps), exponent - 1).clamp(min=info.tiny * info.eps)
        # Below a power of two values lie twice as close as above.
        width = torch.where(mantissa.abs() == 0.5, width / 2, width)
        return width.masked_fill(weight == 0, 0.0).to(weight.dtype)


@dataclass(frozen=True)
class IntegerCells:
    """Signed integers with a scale per row, by its largest entry.

    Args:
        bits: Of an integer.
    """

    bits: int

    def held(self, weight: Tensor) -> Tensor:
        return (weight / self._step(weight)).round() * self._step(weight)

    def width(self, weight: Tensor) -> Tensor:
        # The largest of a row makes the scale of all others.
        largest = weight.abs() >= weight.abs().amax(-1, keepdim=True) * (1 - 1e-3)
        return self._step(weight).expand_as(weight).masked_fill(largest, 0.0)

    def _step(self, weight: Tensor) -> Tensor:
        step: Tensor = weight.abs().amax(-1, keepdim=True).clamp(min=1e-9) / (2 ** (self.bits - 1) - 1)
        return step


def dither(weight: Tensor, cells: Cells, generator: torch.Generator | None = None) -> Tensor:
    """Return masters spread evenly inside their cells: the engine holds the same weights, to the last bit.

    A checkpoint that was published in an engine's storage format lies on its grid. Updates of less than half a step then change
    no weight of the engine, for all weights at once, while the trainer's own policy moves on; a clip on pi_trainer / pi_engine
    stops what the updates reinforce. Spread masters cross their cells' borders one after another, as those of a checkpoint
    that was never rounded do (docs/stability.md).

    Args:
        weight: Masters, float32 or float64, any shape; the last dimension is a row's.
        cells: What the engine stores them as.
        generator: Of the noise; torch's own where None.

    Returns:
        A new tensor of the same shape and dtype. Weights that lie on no grid point stay as they are.

    Raises:
        ConfigError: The masters have no room for noise, since they are of a dtype that is as coarse.
    """
    if weight.dtype not in (torch.float32, torch.float64):
        raise ConfigError(
            f"dither: masters of {weight.dtype} have no values between those that an engine stores; keep masters in float32."
        )
    held = cells.held(weight)
    noise = torch.rand(weight.shape, generator=generator, device=weight.device, dtype=weight.dtype) - 0.5
    spread = torch.where(held == weight, weight + INSIDE * noise * cells.width(weight), weight)
    return torch.where(cells.held(spread) == held, spread, weight)
