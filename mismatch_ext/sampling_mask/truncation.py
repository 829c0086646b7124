"""The support that top-k, top-p and min-p keep, computed again from logits, and the effect of errors in the logits.

This is for an engine that reports only the sampled tokens. min-p and top-k compare logits with a threshold; top-p adds up the
probabilities of all better tokens. With other numerics than the engine's, a token near a threshold may fall on its other side.

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
    """Return the tokens that sampling settings keep, from a model's logits, in vLLM's order: temperature, min-p, top-k, top-p.

    min-p keeps pi(v) >= min_p * max pi. top-k keeps every logit that is not below the k-th. Of the tokens that these two keep,
    top-p keeps a token if all better ones together have a probability of less than p.

    Args:
        logits: `[N, V]`.
        sampling: Temperature, top_p, top_k and min_p.
        tokens: The sampled ids `[N]`, int64, which are always kept; None if there are none to keep.

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
    """Return the largest error of log pi_S from tokens near a threshold, if each logit has an error of up to `tolerance`.

    The result is log(mass of S+ / mass of S-). S- contains the tokens that are certainly kept, S+ those that may be kept
    (`support_bounds`). This bounds the difference of the log masses of any two supports between S- and S+. If no token is
    certainly kept, for example with two equally good tokens under top_k=1, the mass of S- is that of the most likely token,
    reduced by the largest effect of the errors.

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
    """Return the tokens that are kept whatever the errors of the logits, and the tokens that may be kept.

    Args:
        logits: `[N, V]`, before the temperature.
        sampling: Temperature, top_p, top_k and min_p.
        tolerance: Largest error of a logit.

    Returns:
        Two masks `[N, V]`, equal for a tolerance of 0. In a row without a token that is certainly kept, the first is all False.

    Raises:
        RecordError: `logits` is not `[N, V]`, or `tolerance` is negative.
    """
    if logits.dim() != 2 or not tolerance >= 0:
        raise RecordError(f"logits {list(logits.shape)}, tolerance {tolerance}: they must be [N, V], and >= 0.")
    z = logits.double() / sampling.temperature
    # Both sides of a comparison can have the error.
    slack = 2 * tolerance / sampling.temperature
    inner = z > -math.inf
    outer = inner.clone()
    if sampling.min_p > 0:
        least = z.amax(-1, keepdim=True) + math.log(sampling.min_p)
        inner, outer = inner & (z >= least + slack), outer & (z >= least - slack)
    if 0 < sampling.top_k < z.shape[1]:
        # The largest and the smallest possible number of better tokens; a tie with the k-th is kept.
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
    """Return for each token the mass of the other tokens whose logit is higher by more than `by` `[N, V]`."""
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
