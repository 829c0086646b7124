"""The tokens that top-k, top-p and min-p leave, computed again from logits, and what an error of these can change.

For an engine that reports no more than the sampled tokens. min-p and top-k compare logits with a threshold, top-p adds up the
probabilities of all better tokens: with other numerics than the engine's, tokens next to a threshold fall on its other side.

Shapes: N tokens, V vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mismatch_ext.errors import RecordError
from mismatch_ext.provenance import SamplingSettings
from mismatch_ext.sampling_mask.support import TokenSupport, join

# Elements of a chunk's temporaries: 64 MiB in float32.
CHUNK = 1 << 24


def truncated_support(logits: Tensor, sampling: SamplingSettings, tokens: Tensor | None = None) -> TokenSupport:
    """Return the tokens that sampling settings leave of a model's logits, in vLLM's order: temperature, min-p, top-k, top-p.

    min-p keeps pi(v) >= min_p * max pi; top-k keeps every logit that is not below the k-th; top-p, over what these leave, keeps
    every token whose better ones have less than p together.

    Args:
        logits: `[N, V]`.
        sampling: Temperature, top_p, top_k and min_p.
        tokens: The sampled ids `[N]`, int64, which are kept in any case; None keeps none.

    Raises:
        RecordError: `logits` is not `[N, V]`.
    """
    parts = []
    for rows in _rows(logits):
        kept, _ = support_bounds(logits[rows], sampling, 0.0)
        if tokens is not None:
            kept.scatter_(-1, tokens[rows][:, None], True)
        parts.append(TokenSupport.from_mask(kept))
    return join(parts) if parts else TokenSupport.empty(0, logits.shape[1])


def mass_error(logits: Tensor, sampling: SamplingSettings, tolerance: float) -> Tensor:
    """Return how far log pi_S can be off through tokens next to a threshold, where each logit is off by up to `tolerance`.

    It is log(mass of S+ / mass of S-), S- and S+ being what is left for certain and at most (`support_bounds`): an upper bound
    of the difference between log masses of any two supports between them. Where nothing is left for certain, as between two
    equally good tokens under top_k=1, S- is the most likely token, less what the errors can take of it.

    Args:
        logits: `[N, V]`, before the temperature.
        sampling: Temperature, top_p, top_k and min_p.
        tolerance: Largest error of a logit, in the logits' own unit.

    Returns:
        Nats `[N]`, float64.

    Raises:
        RecordError: `logits` is not `[N, V]`, or `tolerance` is negative.
    """
    found = [torch.zeros(0, dtype=torch.float64)]
    for rows in _rows(logits):
        z = logits[rows].double() / sampling.temperature
        inner, outer = support_bounds(logits[rows], sampling, tolerance)
        least, most = (z.masked_fill(~one, -math.inf).logsumexp(-1) for one in (inner, outer))
        least = torch.maximum(least, z.amax(-1) - 2 * tolerance / sampling.temperature)
        found.append((most - least).cpu())
    return torch.cat(found)


def support_bounds(logits: Tensor, sampling: SamplingSettings, tolerance: float) -> tuple[Tensor, Tensor]:
    """Return the tokens that are left whatever the errors of the logits, and those that can be.

    Args:
        logits: `[N, V]`, before the temperature.
        sampling: Temperature, top_p, top_k and min_p.
        tolerance: Largest error of a logit.

    Returns:
        Two masks `[N, V]`, equal for a tolerance of 0. Where no token is left for certain, the first is empty.

    Raises:
        RecordError: `logits` is not `[N, V]`, or `tolerance` is negative.
    """
    if logits.dim() != 2 or not tolerance >= 0:
        raise RecordError(f"logits {list(logits.shape)}, tolerance {tolerance}: they must be [N, V], and >= 0.")
    z = logits.double() / sampling.temperature
    # Both sides of a comparison can be off.
    slack = 2 * tolerance / sampling.temperature
    inner = z > -math.inf
    outer = inner.clone()
    if sampling.min_p > 0:
        least = z.amax(-1, keepdim=True) + math.log(sampling.min_p)
        inner, outer = inner & (z >= least + slack), outer & (z >= least - slack)
    if 0 < sampling.top_k < z.shape[1]:
        # How many others can be better at most, and are at least; a tie with the k-th is kept.
        most, least = _better(z, outer.double(), -slack), _better(z, inner.double(), slack)
        inner, outer = inner & (most < sampling.top_k), outer & (least < sampling.top_k)
    if sampling.top_p < 1:
        mass = z.softmax(-1)
        of_inner, of_outer = ((mass * one).sum(-1, keepdim=True) for one in (inner, outer))
        most = _better(z, mass * outer, -slack) * math.exp(slack)
        least = _better(z, mass * inner, slack) * math.exp(-slack)
        inner, outer = inner & (most < sampling.top_p * of_inner), outer & (least < sampling.top_p * of_outer)
    return inner, outer


def _better(z: Tensor, mass: Tensor, by: float) -> Tensor:
    """Return the mass of the other tokens whose logit is above a token's by more than `by` `[N, V]`."""
    ordered, order = z.sort(-1)
    above = mass.gather(-1, order).flip(-1).cumsum(-1).flip(-1)
    above = torch.cat([above, torch.zeros_like(above[:, :1])], -1)
    limit = z + by
    found = above.gather(-1, torch.searchsorted(ordered, limit, right=True))
    return torch.where(z > limit, found - mass, found).clamp_(min=0.0)


def _rows(logits: Tensor) -> list[slice]:
    if logits.dim() != 2:
        raise RecordError(f"logits {list(logits.shape)}: they must be [N, V].")
    size = max(1, CHUNK // logits.shape[1])
    return [slice(first, first + size) for first in range(0, len(logits), size)]
