"""Ranks pairs of experts by how well their exchange explains an engine's errors, to first order in what the layer puts out.

Shapes: T tokens of a response, E experts, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch
from mismatch_ext.adapters.transformers.doctor.scorer import SCREENED, Scorer
from torch import Tensor, nn

from mismatch_ext.doctor.fits import Noise
from mismatch_ext.doctor.logits import LogitTable


def stacked(experts: nn.Module, count: int) -> bool:
    """Tell whether a module holds all experts of a layer in each of its parameters."""
    return all(len(p) == count for p in experts.parameters())


def exchanged_pairs(scorer: Scorer, experts: Mapping[int, nn.Module], most: int) -> list[tuple[int, int, int]]:
    """Return the `most` best (layer, expert, expert), best first; none if the engine's errors are rounding.

    Modules that are given something else than chosen experts and their gates, such as Llama 4's, are left out.
    """
    sample = scorer.sample
    table = LogitTable.of(sample, scorer.scores.logits, scorer.temperature)
    error, noise = sample.engine - table.logprob, Noise.of(scorer.scores.own - table.logprob, table.spread)
    if noise.is_rounding(error):
        return []
    # The slope of how likely the errors are as rounding: an exchange that moves log-probabilities along it explains them.
    along = torch.from_numpy(error * noise.trust(error)).float()
    rows = np.unique(sample.row[sample.fits])[:SCREENED].tolist()
    # Of each two experts: the sum over tokens, and that of squares.
    moved: dict[int, Tensor] = {}
    calls: dict[int, tuple[tuple[Any, ...], Tensor]] = {}

    # Gives every output a slope where a merged adapter has left the weights frozen.
    zero = torch.zeros((), requires_grad=True)

    def called(layer: int, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor | None:
        # Chosen experts and their gates, one for one: what most families hand on.
        if len(inputs) != 3 or inputs[1].shape != inputs[2].shape:
            return None
        calls[layer] = inputs, output + zero.to(output)
        return calls[layer][1]

    with ExitStack() as stack:
        for layer, module in experts.items():
            stack.callback(module.register_forward_hook(partial(called, layer)).remove)
        for row, logprobs in scorer.with_grad(rows):
            own, mask = torch.from_numpy(sample.row == row), torch.tensor(sample.masks[row], device=logprobs.device)
            loss = (along[own].to(logprobs.device) * logprobs[mask]).sum()
            seen = dict(calls)
            if not seen:
                return []
            slopes = torch.autograd.grad(loss, [output for _, output in seen.values()])
            for (layer, (inputs, _)), slope in zip(seen.items(), slopes, strict=True):
                moved[layer] = moved.get(layer, torch.zeros(())) + _moved(experts[layer], inputs, slope)
    ranked: list[tuple[float, int, int, int]] = []
    for layer, (total, squares) in moved.items():
        # A pair stands out if its tokens agree.
        score = total / squares.clamp(min=1e-30).sqrt()
        one, other = torch.triu_indices(len(score), len(score), offset=1)
        best, at = score[one, other].topk(min(most, len(one)))
        ranked += zip(best.tolist(), [layer] * len(at), one[at].tolist(), other[at].tolist(), strict=True)
    return [(layer, i, j) for _, layer, i, j in sorted(ranked, reverse=True)[:most]]


def _moved(module: nn.Module, inputs: tuple[Any, ...], slope: Tensor) -> Tensor:
    """Return by how much the exchange of each two experts moves a loss with this slope of the layer's output.

    The sum over tokens, and that of squares `[2, E, E]`. A token adds (given_i - given_j)(along_j - along_i).
    """
    hidden, chosen, gates = (x.detach() for x in inputs)
    count = len(next(module.parameters()))
    # In float64, since terms of the squares cancel.
    given = torch.zeros(len(chosen), count, device=gates.device, dtype=torch.float64)
    given.scatter_(1, chosen.long(), gates.double())
    with torch.no_grad():
        each = (module(hidden, torch.full_like(chosen[:, :1], e), torch.ones_like(gates[:, :1])) for e in range(count))
        along = torch.stack(
            [(output.view_as(slope) * slope).flatten(end_dim=-2).sum(-1) for output in each], 1
        ).double()
    both = given * along
    swapped, squares = given.T @ along, given.square().T @ along.square()
    # Of each pair the half that names its first expert; the transpose adds the other.
    halves = [
        swapped - swapped.diagonal()[:, None],
        squares + squares.diagonal()[:, None]
        + 2 * (both.T @ both - (given * both).T @ along - (along * both).T @ given),
    ]  # fmt: skip
    return torch.stack([half + half.T for half in halves]).cpu()
