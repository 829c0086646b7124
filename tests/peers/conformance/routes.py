"""Routes that a model cannot have chosen, although each id in them is valid. Imports no host."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

SWAPPED = r"layer \d of the routing trace .* The trace's layer \d shares .* layers are swapped"
SHIFTED = r"rows are shifted by one"
OTHERS = r"No other layer fits either"


def _drawn(ids: Tensor) -> Tensor:
    # Rows of the same sample in another order may agree by more than half: a random model sends many tokens alike.
    experts = int(ids.max()) + 1
    draws = torch.rand(*ids.shape[:-1], experts, generator=torch.Generator().manual_seed(0))
    return draws.argsort(-1)[..., : ids.shape[-1]].to(ids)


def _last(ids: Tensor, other: Tensor) -> Tensor:
    return torch.cat([ids[:, :-1], other[:, None]], 1)


FAULTS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "layers reversed": (lambda ids: ids.flip(1), SWAPPED),
    "rows late": (lambda ids: ids.roll(1, 0), SHIFTED),
    "drawn": (_drawn, OTHERS),
    "last layer drawn": (lambda ids: _last(ids, _drawn(ids[:, -1])), OTHERS),
}
"""What is done to the routes of a sample `[R, L, K]`, and what the error says."""
