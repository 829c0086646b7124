"""Named sums: measures that can be merged over batches, micro-batches and ranks in any order.

sums = merged(gap_sums(...), gap_sums(...))    # two batches
sums = over_ranks(sums, ranks)                 # all ranks, by one all-reduce
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from mismatch_ext.ranks import Ranks

Sums = dict[str, Tensor]
"""Tensors by name, float64 and on the CPU. The last part of a name says how two of them are merged:

    name            added
    max:name        the larger one, elementwise; -inf where there is nothing
    logsumexp:name  log(e^a + e^b); -inf where there is nothing
    smallest:name   rows [k, columns]: the k rows with the smallest first column; inf fills up rows that are missing
    moments:name    [1 + v + v * v] of v variables: count, means, and sums of products of deviations from the means
"""


def merged(*parts: Mapping[str, Tensor]) -> Sums:
    """Return the sums of all parts together; the parts need the same names and shapes."""
    return {name: _together(name, torch.stack([part[name] for part in parts])) for name in parts[0]}


def over_ranks(sums: Mapping[str, Tensor], ranks: Ranks) -> Sums:
    """Return the sums of all ranks together, by one all-reduce in which every rank must take part with the same names."""
    if ranks.size == 1:
        return dict(sums)
    names = sorted(sums)  # every rank in the same order
    added = [name for name in names if _way(name) == ""]
    others = [name for name in names if _way(name) != ""]
    mine = [torch.cat([sums[name].flatten() for name in part] or [torch.zeros(0)]) for part in (added, others)]
    # What does not add up is sent in a place of its own for each rank, and zeros of the other ranks are added to it.
    places = torch.zeros(ranks.size, len(mine[1]), dtype=torch.float64)
    places[ranks.rank] = mine[1]
    total = ranks.sum(torch.cat([mine[0].double(), places.flatten()]))
    whole = dict(zip(added, _split(total[None, : len(mine[0])], [sums[name] for name in added]), strict=True))
    by_rank = _split(total[len(mine[0]) :].view(places.shape), [sums[name] for name in others])
    collected = {name: _together(name, values) for name, values in zip(others, by_rank, strict=True)}
    return {name: whole[name][0] if name in whole else collected[name] for name in sums}


def prefixed(name: str, sums: Mapping[str, Tensor]) -> Sums:
    """Return sums as a part of larger ones, with names `name/...`."""
    return {f"{name}/{key}": value for key, value in sums.items()}


def part(sums: Mapping[str, Tensor], name: str) -> Sums:
    """Return the sums that `prefixed` made a part of larger ones."""
    return {key.removeprefix(f"{name}/"): value for key, value in sums.items() if key.startswith(f"{name}/")}


def moments(values: Tensor) -> Tensor:
    """Return the entry `moments:name` of n samples of v variables `[v, n]`."""
    count, means = values.shape[1], values.mean(1) if values.shape[1] else values.new_zeros(len(values))
    away = values - means[:, None]
    return torch.cat([means.new_tensor([count]), means, (away @ away.T).flatten()])


def _way(name: str) -> str:
    return name.rpartition("/")[2].rpartition(":")[0]


def _split(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Return the entries of each row of `flat`, in their own shapes, rows first."""
    pieces = flat.split([x.numel() for x in like], dim=1)
    return [piece.reshape(len(flat), *x.shape) for piece, x in zip(pieces, like, strict=True)]


def _together(name: str, values: Tensor) -> Tensor:
    """Merge the values of several parts, which are the first dimension."""
    match _way(name):
        case "max":
            return values.amax(0)
        case "logsumexp":
            return values.logsumexp(0)
        case "smallest":
            rows = values.flatten(0, 1)
            return rows[rows[:, 0].argsort()[: values.shape[1]]]
        case "moments":
            return _merged_moments(values)
    return values.sum(0)


def _merged_moments(values: Tensor) -> Tensor:
    """Merge moments without cancellation, as Chan, Golub and LeVeque (1983) do."""
    variables = math.isqrt(values.shape[1] - 1)  # 1 + v + v * v entries
    counts, means, products = values.split([1, variables, variables * variables], dim=1)
    count = counts.sum(0)
    mean = (counts * means).sum(0) / count.clamp(min=1)
    away = means - mean
    between = torch.einsum("pi,pj->ij", counts * away, away)
    return torch.cat([count, mean, products.sum(0) + between.flatten()])
