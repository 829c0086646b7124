"""Score centering (arXiv 2609.20807): takes out of a policy gradient what it would learn from the sampler alone.

Tokens come from the sampler q, and scores from the policy p. With weights w and an advantage A, the expected update is

    E_q[A w grad log p] = E_q[A] E_q[w grad log p] + Cov_q(A, w grad log p)

The first term pulls the policy towards the sampler whatever the rewards are: E_q[grad log p] is 0 only if q = p. Score centering
subtracts it, by a term that is added to the loss of each token:

    loss = -A w log p(token) + A * centering_terms(...)

It removes that pull and nothing else. It does not make the gradient unbiased; importance weights do, and both can be combined.

Only the sampler's k most likely tokens (the head) are known. The tail of the sampler is taken to be the policy's tail, scaled to
the mass that is left: q_v = rho p_v, with rho = (1 - q(head)) / (1 - p(head)).

Shapes: B rows, T tokens, V vocabulary, K tokens of the head.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mismatch_ext.errors import RecordError

EMPTY_TAIL = 1e-6
"""Mass below which the policy's tail counts as empty: in float32 the rest of it is rounding."""


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
    if bool(((q_tail < -1e-3) & sampled).any()):
        raise RecordError(
            "head_logprobs: the sampler's most likely tokens have more probability than 1 together; give log-probabilities of "
            "different tokens, in nats."
        )
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
