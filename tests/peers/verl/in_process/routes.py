"""Ragged rows, routes as a rollout engine sends them, and what an error of ours says. Imports nothing of verl."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from mismatch_ext.adapters.verl.rollout.digests import with_digests
from torch import Tensor

from mismatch_ext.errors import MismatchError


def nested(parts: Sequence[Tensor]) -> Tensor:
    """Return a tensor of ragged rows."""
    return torch.nested.as_nested_tensor(list(parts), layout=torch.jagged)


def as_rollout(routes: Tensor) -> Tensor:
    """Return routes as verl gets them from a rollout engine: 16 bits, and no row for the last sampled token."""
    rows = [row.to(torch.int16).clone() for row in routes.unbind()]
    for row in rows:
        row[-1] = 0
    return nested(rows)


def carrying(routes: Tensor, tokens: Tensor) -> Tensor:
    """Return routes with digests of their samples' tokens, as rollouts carry them; zeros at a sample's end were not recorded."""
    rows = []
    for row, ids in zip(routes.unbind(), tokens.unbind(), strict=True):
        found = torch.from_numpy(with_digests(row, ids.tolist()))
        recorded = row.flatten(1).any(1).nonzero() if row.shape[-1] > 1 else torch.tensor([[len(ids) - 2]])
        found[int(recorded[-1]) + 1 if len(recorded) else 0 :] = 0
        rows.append(found)
    return nested(rows)


def other(routes: Tensor) -> Tensor:
    """Return routes of which the last slot is another expert, of each sample another one, in every row that has one."""
    rows = []
    for number, row in enumerate(routes.unbind()):
        row = row.clone()
        for ids in row.flatten(0, 1):
            if ids.any():
                free = sorted(set(range(16)) - set(ids.tolist()))
                ids[-1] = free[number % len(free)]
        rows.append(row)
    return nested(rows)


def refused(run: Any, *args: Any, **kwargs: Any) -> str:
    """Return the class and message of an error of ours; anything else is raised, and nothing is an answer too."""
    try:
        run(*args, **kwargs)
    except MismatchError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"
