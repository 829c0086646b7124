"""Score centering (arXiv 2609.20807): takes out of a policy gradient what it would learn from the sampler alone.

Tokens come from the sampler q, and scores from the policy p. With weights w and an advantage A, the expected update is

    E_q[A w grad log p] = E_q[A] E_q[w grad log p] + Cov_q(A, w grad log p)

The first term pulls the policy towards the sampler whatever the rewards are: E_q[grad log p] is 0 only if q = p. Score centering
subtracts it, by a term that is added to the loss of each token:

    loss = -A w log p(token) + A * centering_terms(...)

It removes that pull and nothing else. It does not make the gradient unbiased; importance weights do, and both can be combined.

Only the sampler's k most likely tokens (the head) are known. The tail of the sampler is taken to be the policy's tail, scaled to
the mass that is left: q_v = rho p_v, with rho = (1 - q(head)) / (1 - p(head)).

Shapes: B rows, T tokens, N tokens of all rows, V vocabulary, H hidden size, K tokens of the head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mismatch_ext.errors import RecordError

EMPTY_TAIL = 1e-6
"""Mass below which the policy's tail counts as empty: in float32 the rest of it is rounding."""
SAMPLER_BIAS = "sampler_bias"
"""Name of the metric: the mean of `sampler_bias` over sampled tokens."""
MOST = 1e-3
"""Largest logarithm of a head's mass that can be rounding. A choice."""
HEAVY = (
    "head_logprobs: the sampler's most likely tokens have more probability than 1 together; give log-probabilities of different "
    "tokens, in nats."
)
LOGITS = 1 << 24
"""Logits that are held at once when they are made of hidden states: 64 MiB in float32."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenHead:
    """The most likely tokens that an engine reported at each place of a response: 8 bytes for each of them.

    Args:
        ids: Token ids `[T, K]`, int32, each once at a place.
        logprobs: Their natural-log probabilities `[T, K]`, float32; -inf fills up a place with fewer.

    Raises:
        RecordError: The shapes differ, or the tokens of a place have more probability than 1.
    """

    ids: Tensor
    logprobs: Tensor

    def __post_init__(self) -> None:
        if self.ids.shape != self.logprobs.shape or self.ids.dim() != 2:
            raise RecordError(
                f"a head has ids {list(self.ids.shape)} and log-probabilities {list(self.logprobs.shape)}; both must be [T, K]."
            )
        if len(self.ids) and float(self.logprobs.logsumexp(-1).max()) > MOST:
            raise RecordError(HEAVY)

    def __len__(self) -> int:
        return len(self.ids)

    @classmethod
    def from_lists(
        cls, ids: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float | None]], top_k: int
    ) -> TokenHead:
        """Store the first `top_k` tokens of each place, which are the most likely ones; a place may have fewer."""
        head_ids = torch.zeros(len(ids), top_k, dtype=torch.int32)
        head_logprobs = torch.full((len(ids), top_k), -torch.inf)
        for place, (tokens, values) in enumerate(zip(ids, logprobs, strict=True)):
            count = min(top_k, len(tokens))
            head_ids[place, :count] = torch.tensor(tokens[:count], dtype=torch.int32)
            known = [-math.inf if value is None else value for value in values[:count]]
            head_logprobs[place, :count] = torch.tensor(known)
        return cls(ids=head_ids, logprobs=head_logprobs)


class TopTokens:
    """Takes the most likely tokens of a response from an engine's arrays as it samples, without an object for each."""

    def __init__(self) -> None:
        self._parts: list[tuple[NDArray[Any], NDArray[Any]]] = []

    def take(self, ids: NDArray[Any], logprobs: NDArray[Any]) -> None:
        """Add places: ids and log-probabilities `[places, 1 + K]`, those of the sampled token first."""
        self._parts.append((ids[:, 1:].astype(np.int32), logprobs[:, 1:].astype(np.float32)))

    def head(self, top_k: int) -> TokenHead:
        """Return what was taken, of `top_k` tokens at each place."""
        if not self._parts:
            return TokenHead(ids=torch.zeros(0, top_k, dtype=torch.int32), logprobs=torch.zeros(0, top_k))
        ids, logprobs = (torch.from_numpy(np.concatenate(column)) for column in zip(*self._parts, strict=True))
        # What was cut off has -inf, or NaN in some versions.
        return TokenHead(ids=ids, logprobs=logprobs.masked_fill(logprobs.isnan(), -torch.inf))


def padded_heads(
    heads: Sequence[TokenHead | None], length: int, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Return the ids `[B, T, K]`, int64, and log-probabilities `[B, T, K]` of rows, with `length` places in each.

    A row without a head, and a place after the end of one, has log-probabilities of -inf: its term and its bias are 0.
    """
    width = max((head.ids.shape[1] for head in heads if head is not None), default=1)
    ids = torch.zeros(len(heads), length, width, dtype=torch.int64)
    logprobs = torch.full((len(heads), length, width), -torch.inf)
    for row, head in enumerate(heads):
        if head is not None:
            ids[row, : len(head), : head.ids.shape[1]] = head.ids
            logprobs[row, : len(head), : head.ids.shape[1]] = head.logprobs
    return ids.to(device), logprobs.to(device)


def centering_terms(
    *,
    logits: Tensor,
    head_ids: Tensor,
    head_logprobs: Tensor,
    response_mask: Tensor,
    upper: float | None = None,
    lower: float | None = None,
) -> Tensor:
    """Return the term of each token whose gradient is the expected weighted score, E_q[w grad log p].

    Multiply it by the token's advantage, and add it to the loss. Score centering, arXiv 2609.20807:

        sum over the head of sg(q_v w(p_v / q_v) - alpha p_v) log p_v,   alpha = rho w(1 / rho)

    where sg stops the gradient. The tail needs no logits of its own, because the score of all tokens together is 0 under p.

    Args:
        logits: The policy's logits with their graph `[B, T, V]` or `[T, V]`, divided by the temperature of sampling.
        head_ids: Ids of the sampler's most likely tokens at each place `[B, T, K]` or `[T, K]`, int64, each once.
        head_logprobs: The sampler's natural-log probabilities of them, of the same shape; -inf fills up a place with fewer.
        response_mask: True at tokens that the policy sampled `[B, T]` or `[T]`. The others get 0.
        upper: Upper bound of the loss's importance weight p/q (truncated, TIS); None if it has no weight.
        lower: Lower bound, if the weight is 0 outside of a band (IcePop).

    Returns:
        The terms `[B, T]` or `[T]`, float32 or wider. Their values mean nothing; their gradients do.

    Raises:
        RecordError: Shapes differ, or a head has more probability than 1.
    """
    coefficients, logprobs = _head(logits, head_ids, head_logprobs, response_mask, upper, lower)
    # A token that fills up a head has coefficient 0 and a log-probability that is finite.
    return (coefficients * logprobs).sum(-1).masked_fill(~response_mask.bool(), 0.0)


@torch.no_grad()
def sampler_bias(
    *,
    logits: Tensor,
    head_ids: Tensor,
    head_logprobs: Tensor,
    response_mask: Tensor,
    upper: float | None = None,
    lower: float | None = None,
) -> Tensor:
    """Return the size of the expected score E_q[w grad log p] at each token `[B, T]`, in the space of logits.

    It is what an update with advantage 1 distils from the sampler at this place: the Euclidean norm of q w - p E_q[w] over the
    vocabulary (arXiv 2609.20807), without weights |q - p|. Arguments and errors are those of `centering_terms`. The norm is 0 if
    the sampler is the policy, and at places without a token.
    """
    # The gradient of sum_v c_v log p_v in the logits is c - p sum(c), where c is 0 in the tail.
    coefficients, logprobs = _head(logits, head_ids, head_logprobs, response_mask, upper, lower)
    probs = logprobs.exp()
    total = coefficients.sum(-1, keepdim=True)
    in_head = coefficients - probs * total
    known = head_logprobs.isfinite()
    squares = torch.where(known, in_head.square(), 0.0).sum(-1)
    everywhere = logits.to(logprobs.dtype).log_softmax(-1).exp().square().sum(-1)
    in_tail = everywhere - torch.where(known, probs.square(), 0.0).sum(-1)
    squares = squares + total[..., 0].square() * in_tail.clamp(min=0.0)
    return squares.sqrt().masked_fill(~response_mask.bool(), 0.0)


def projected_terms(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    head_ids: Tensor,
    head_logprobs: Tensor,
    temperature: float = 1.0,
    scale: float = 1.0,
    softcap: float | None = None,
    upper: float | None = None,
    lower: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `centering_terms` and `sampler_bias` `[N]` from hidden states `[N, H]` and an output projection `[V, H]`.

    The logits are scale * (h . w_v + b_v), then softcap * tanh(z / softcap), then z / temperature, in the dtype of autocast until
    they are multiplied. They are made in chunks, and again in the backward pass, so that none of all tokens are ever held. The
    other arguments are those of `centering_terms`.
    """

    def logits_of(states: Tensor) -> Tensor:
        logits = nn.functional.linear(states, weight, bias)
        logits = _wide(logits) * scale
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        return logits / temperature

    size = max(1, LOGITS // weight.shape[0])
    return _in_chunks(logits_of, size, hidden, head_ids, head_logprobs, upper, lower)


def terms_and_biases(
    logits: Tensor,
    *,
    head_ids: Tensor,
    head_logprobs: Tensor,
    temperature: float = 1.0,
    upper: float | None = None,
    lower: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `centering_terms` and `sampler_bias` `[N]` from logits before the temperature `[N, V]`, in any dtype.

    What is made of the logits is made in chunks, and again in the backward pass. So of all tokens no second copy of the logits is
    held. The other arguments are those of `centering_terms`.
    """
    size = max(1, LOGITS // logits.shape[-1])
    return _in_chunks(lambda part: _wide(part) / temperature, size, logits, head_ids, head_logprobs, upper, lower)


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _in_chunks(
    logits_of: Callable[[Tensor], Tensor],
    size: int,
    states: Tensor,
    head_ids: Tensor,
    head_logprobs: Tensor,
    upper: float | None,
    lower: float | None,
) -> tuple[Tensor, Tensor]:
    """Return terms and biases `[N]` of tokens, `size` of them at once, each chunk computed again in the backward pass."""

    def of_chunk(part: Tensor, ids: Tensor, logprobs: Tensor) -> tuple[Tensor, Tensor]:
        given: dict[str, Any] = {
            "logits": logits_of(part),
            "head_ids": ids,
            "head_logprobs": logprobs,
            "response_mask": torch.ones(len(part), dtype=torch.bool, device=part.device),
            "upper": upper,
            "lower": lower,
        }
        return centering_terms(**given), sampler_bias(**given)

    chunks = zip(states.split(size), head_ids.split(size), head_logprobs.split(size), strict=True)
    # An empty tensor is split into one empty part.
    parts = [checkpoint(of_chunk, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
    terms, biases = (torch.cat(column) for column in zip(*parts, strict=True))
    return terms, biases


def weight_of(log_ratio: Tensor, upper: float | None, lower: float | None) -> Tensor:
    """Return the importance weights of log-ratios log p - log q, of any shape: 1, truncated, or 0 outside of a band."""
    if upper is None:
        return torch.ones_like(log_ratio)
    ratio = log_ratio.clamp(max=20.0).exp()
    if lower is None:
        return ratio.clamp(max=upper)
    outside = (ratio < lower) | (ratio > upper)
    return ratio.masked_fill(outside, 0.0)


def _head(
    logits: Tensor,
    head_ids: Tensor,
    head_logprobs: Tensor,
    response_mask: Tensor,
    upper: float | None,
    lower: float | None,
) -> tuple[Tensor, Tensor]:
    """Return the coefficients, without graph, and the policy's log-probabilities of the head, both `[..., K]`."""
    _check_shapes(logits, head_ids, head_logprobs, response_mask)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    # Only the head is gathered, so that nothing but the logits themselves has the vocabulary's size.
    logprobs = wide.gather(-1, head_ids) - wide.logsumexp(-1, keepdim=True)
    sampler = head_logprobs.to(logprobs.dtype)
    known = sampler.isfinite()
    policy = logprobs.detach()

    q = torch.where(known, sampler.exp(), 0.0)
    p = torch.where(known, policy.exp(), 0.0)
    q_tail = 1.0 - q.sum(-1, keepdim=True)
    sampled = response_mask.bool()[..., None]
    if bool(((q_tail < -MOST) & sampled).any()):
        raise RecordError(HEAVY)
    p_tail = 1.0 - p.sum(-1, keepdim=True)
    empty = p_tail < EMPTY_TAIL
    rho = torch.where(empty, 1.0, q_tail.clamp(min=0.0) / p_tail.clamp(min=EMPTY_TAIL))
    # rho w(1 / rho), which is 0 for rho = 0 without weights, and stays finite with them.
    log_rho = rho.clamp(min=math.exp(-20.0)).log()
    alpha = rho * weight_of(-log_rho, upper, lower)

    log_ratio = torch.where(known, policy - sampler, 0.0)
    coefficients = q * weight_of(log_ratio, upper, lower) - alpha * p
    return torch.where(known & sampled, coefficients, 0.0), logprobs


def _check_shapes(logits: Tensor, head_ids: Tensor, head_logprobs: Tensor, response_mask: Tensor) -> None:
    places = tuple(response_mask.shape)
    found = {"logits": logits.shape[:-1], "head_ids": head_ids.shape[:-1], "head_logprobs": head_logprobs.shape[:-1]}
    for name, shape in found.items():
        if tuple(shape) != places:
            raise RecordError(
                f"{name} is for places {list(shape)}, and response_mask for {list(places)}; both must be equal."
            )
    if head_ids.shape != head_logprobs.shape:
        raise RecordError(
            f"head_ids has shape {list(head_ids.shape)} and head_logprobs {list(head_logprobs.shape)}; both must be equal."
        )
