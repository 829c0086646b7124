"""Routes that a model cannot have chosen, although each id in them is valid. Imports no host."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

SWAPPED = r"layer \d of the routing trace .* The trace's layer \d shares .* layers are swapped"
SHIFTED = r"rows are shifted by one"
OTHERS = r"No other layer fits either"


def _shuffled(ids: Tensor) -> Tensor:
    return ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))]


def _last(ids: Tensor, other: Tensor) -> Tensor:
    return torch.cat([ids[:, :-1], other[:, None]], 1)


FAULTS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "layers reversed": (lambda ids: ids.flip(1), SWAPPED),
    "first and last layer swapped": (lambda ids: torch.cat([ids[:, -1:], ids[:, 1:-1], ids[:, :1]], 1), SWAPPED),
    "rows late": (lambda ids: ids.roll(1, 0), SHIFTED),
    "rows early": (lambda ids: ids.roll(-1, 0), SHIFTED),
    "rows shuffled": (_shuffled, OTHERS),
    "last layer shuffled": (lambda ids: _last(ids, _shuffled(ids[:, -1])), OTHERS),
    "last layer is the first": (lambda ids: _last(ids, ids[:, 0]), OTHERS),
}
"""What is done to the routes of a sample `[R, L, K]`, and what the error says."""
