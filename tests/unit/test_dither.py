"""Masters spread inside the cells of an engine's grid: the engine's weights stay, and small updates reach them one by one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from examples.dither import FloatCells, IntegerCells, dither

CELLS = [FloatCells(torch.bfloat16), FloatCells(torch.float16), IntegerCells(4), IntegerCells(8)]


def masters(generator: torch.Generator, cells: object, *, on: bool = True) -> Tensor:
    """Return weights as a checkpoint has them: of both signs, of many sizes, with powers of two and zeros among them."""
    weight = torch.randn(64, 96, generator=generator) * torch.logspace(-3, 0, 64)[:, None]
    weight[:, :4] = torch.tensor([0.0, 0.5, -0.25, 0.125])
    return cells.held(weight) if on else weight  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("cells", CELLS, ids=str)
def test_the_engine_holds_the_same_weights_to_the_last_bit(cells: object) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = masters(generator, cells)
    spread = dither(weight, cells, generator)  # type: ignore[arg-type]
    assert torch.equal(cells.held(spread), cells.held(weight))  # type: ignore[attr-defined]
    moved = spread != weight
    # Zeros, the largest of each row, and powers of two below which cells are narrow may stay.
    assert moved.float().mean() > 0.85
    width = cells.width(weight)  # type: ignore[attr-defined]
    assert ((spread - weight).abs() <= width / 2).all()


@pytest.mark.parametrize("cells", CELLS, ids=str)
def test_updates_below_half_a_step_reach_the_engine_by_their_share(cells: object) -> None:
    """Of masters on the grid none follows an update of a quarter of a step; of spread ones a quarter does."""
    generator = torch.Generator().manual_seed(1)
    weight = masters(generator, cells)
    width = cells.width(weight)  # type: ignore[attr-defined]
    inner = (width > 0) & (torch.frexp(weight.double())[0].abs() != 0.5)
    step = torch.where(inner, width / 4, 0.0)

    def followed(start: Tensor) -> float:
        return float((cells.held(start + step) != cells.held(start))[inner].float().mean())  # type: ignore[attr-defined]

    assert followed(weight) == 0.0
    assert followed(dither(weight, cells, generator)) == pytest.approx(0.25, abs=0.03)  # type: ignore[arg-type]


def test_masters_as_coarse_as_the_engine_are_refused() -> None:
    with pytest.raises(ValueError, match="torch.bfloat16 have no values between"):
        dither(torch.zeros(2, 2, dtype=torch.bfloat16), FloatCells(torch.bfloat16))
