"""The exact KL divergence over the vocabulary, without a second tensor of the logits' size.

Shapes: B rows, T tokens, V vocabulary, N tokens in all, n tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mismatch_ext.config import KlConfig
from mismatch_ext.errors import ConfigError, NonFiniteLogprobError, RecordError
from mismatch_ext.kl.inputs import checked_coef, checked_tokens
from mismatch_ext.kl.surrogate import mean_of_others

# float32 elements of a chunk. On a CPU, its two temporaries stay in the shared cache; elsewhere they are 256 MiB.
CPU_CHUNK, CHUNK = 1 << 20, 1 << 26
# exp(-d) overflows float32 at d = -88. If d is above FAR, no entry that matters has underflowed.
FAR = -60.0


def kl_full(
    logits: Tensor,
    ref_logits: Tensor,
    *,
    mask: Tensor | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """Return KL(pi || pi_ref) of each token's distribution, exact over the vocabulary.

    With d_v = log pi_v - log pi_ref,v the value is sum_v pi_v (d_v - 1 + exp(-d_v)). It equals sum_v pi_v d_v, because both
    distributions sum to 1, but its terms are never negative: a KL of 1e-9 keeps its digits in float32, where the plain sum
    cancels. The gradient with respect to logit v is pi_v (d_v - sum_u pi_u d_u) / temperature.

    Forward and backward take tokens in chunks, and the backward pass computes the softmax again. Besides the inputs, only the
    gradient itself has the size `[B, T, V]`, in the logits' own dtype.

    Args:
        logits: The policy's `[B, T, V]`, or any leading shape, any float dtype, with gradient.
        ref_logits: The reference's, same shape; a constant.
        mask: True, or 1, where the KL is wanted `[B, T]`. Other tokens are not read; their value and gradient are 0.
        temperature: Divides both logits first.

    Returns:
        KL in nats `[B, T]`, float32 (float64 for float64 logits), never negative.

    Raises:
        RecordError: Shapes or dtypes do not fit.
        NonFiniteLogprobError: A NaN, or a token that the policy can sample and the reference cannot: its KL is infinite.
            A logit of -inf in both, as for masked vocabulary, is a probability of 0 and adds nothing.
    """
    if logits.shape != ref_logits.shape or logits.dim() < 2 or not (logits.is_floating_point() and temperature > 0):
        raise RecordError(
            f"logits {list(logits.shape)} of {logits.dtype}, ref_logits {list(ref_logits.shape)}, temperature {temperature}: "
            "one floating-point shape [..., V] and a temperature > 0 are needed."
        )
    if mask is not None and mask.shape != logits.shape[:-1]:
        raise RecordError(f"mask {list(mask.shape)} does not fit logits {list(logits.shape)}; it must be [..., T].")
    chunk = max(1, (CPU_CHUNK if logits.device.type == "cpu" else CHUNK) // logits.shape[-1])
    wanted = None if mask is None else mask.bool()
    kl: Tensor = _FullKl.apply(logits, ref_logits.detach(), wanted, float(temperature), chunk)
    if not bool(torch.isfinite(kl).all()):
        place = [int(x) for x in (~torch.isfinite(kl.detach())).nonzero()[0]]
        raise NonFiniteLogprobError(
            f"the KL divergence at position {place} is {float(kl[tuple(place)])}: a logit is NaN, or the policy gives "
            "probability to a token that has none under the reference. Mask the position, or give both the same vocabulary."
        )
    return kl


def kl_full_surrogate(
    logits: Tensor,
    ref_logits: Tensor,
    logprobs: Tensor,
    mask: Tensor,
    config: KlConfig,
    *,
    behavior_logprobs: Tensor | None = None,
    coef: float | None = None,
    groups: Tensor | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """Return the Rao-Blackwellised KL term of sampled responses: exact over each token, sampled over prefixes only.

    K_t is the KL divergence of token t's distribution given its prefix, and c_t the product of pi/mu up to token t:

        term_t = coef [ v_t K_t + A_t (log pi_t - sg(log pi_t)) ],    A_t = sum of later K_s, s > t

    K_t is already an expectation over token t, so only later KL is credited to the token. For target "token", the second summand
    is left out, and placements "loss" and "both" are exact given the prefix. For target "sequence" and placement "both", the
    expected gradient is that of KL(pi||ref) of whole responses. Ratio "sequence" weighs K_s by c_{s-1}, the ratio of its prefix:
    this is unbiased for samples of mu. Ratio "token" weighs A_t by pi/mu of token t: this is biased for target "sequence".
    Placement "loss" lacks the credit for target "sequence"; placement "reward" lacks the path-wise part of both targets.

    Args:
        logits: The policy's `[B, T, V]`, with gradient.
        ref_logits: The reference's logits `[B, T, V]`.
        logprobs: log pi of the sampled tokens `[B, T]`, nats, at the same temperature, with gradient.
        mask: True, or 1, at tokens that the policy sampled `[B, T]`.
        config: Estimator "full", placement, target, ratio, baseline and coefficient.
        behavior_logprobs: log mu under the policy that sampled `[B, T]`; needed for a ratio.
        coef: Coefficient to use instead of `config.coef`.
        groups: For the baseline, an integer per row `[B]`; see `kl_surrogate`.
        temperature: Divides both logits first.

    Returns:
        Terms `[B, T]`, float32 or wider. Their value is coef v_t K_t.

    Raises:
        ConfigError: Another estimator than "full"; no coefficient; a ratio without `behavior_logprobs`.
        RecordError: Shapes or dtypes do not fit.
        NonFiniteLogprobError: See `kl_full` and `kl_surrogate`.
    """
    if config.estimator != "full":
        raise ConfigError(f"mismatch.kl.estimator={config.estimator!r}: this term is for 'full'; use kl_surrogate.")
    # "k1" lets a sampled estimator's checks run here too: ratio, coefficient.
    coef = checked_coef(replace(config, estimator="k1"), coef, behavior_logprobs)
    tokens = checked_tokens(logprobs, logprobs.detach(), mask, behavior_logprobs)
    exact = kl_full(logits, ref_logits, mask=tokens.mask, temperature=temperature).double()
    ratio = tokens.ratio(config.ratio)
    before = torch.ones_like(ratio)
    if config.ratio == "sequence":
        before = torch.cat([ratio[:, :1] * 0 + 1, ratio[:, :-1]], dim=1)
    value = before * exact
    if config.placement == "reward":
        value = value.detach()
    if config.placement == "loss" or config.target == "token":
        return (coef * value).to(tokens.dtype)
    later = value.detach().flip(-1).cumsum(-1).flip(-1) - value.detach()
    credit = ratio * later if config.ratio == "token" else later
    if config.baseline == "leave_one_out":
        credit = credit - ratio * mean_of_others(later, tokens.mask, groups)
    score = credit * (tokens.logprobs - tokens.logprobs.detach())
    return (coef * (value + score)).to(tokens.dtype)


def _rows(tensor: Tensor) -> Iterator[tuple[Any, Tensor]]:
    """Yield index and view `[T, V]` for each leading index, because flattening a slice of a batch would copy all of it."""
    if tensor.dim() == 2:
        yield ..., tensor
        return
    for index in range(tensor.shape[0]):
        for rest, view in _rows(tensor[index]):
            yield (index,) if rest is ... else (index, *rest), view


class _FullKl(torch.autograd.Function):
    """Forward and backward in chunks of tokens."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, reference: Tensor, mask: Tensor | None, temperature: float, chunk: int
    ) -> Tensor:
        ctx.save_for_backward(logits, reference, mask)
        ctx.temperature, ctx.chunk = temperature, chunk
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        kl = torch.zeros(logits.shape[:-1], dtype=dtype, device=logits.device)
        for index, rows in _rows(logits):
            wanted = None if mask is None else mask[index]
            for chosen in _chunks(rows.shape[0], wanted, chunk, logits.device):
                d, p = _difference(rows[chosen], reference[index][chosen], dtype, temperature)
                kl[index][chosen] = _divergence(d, p, reference[index][chosen], temperature)
        return kl

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, reference, mask = ctx.saved_tensors
        (outer,) = gradients
        result = torch.empty_like(logits) if mask is None else torch.zeros_like(logits)
        for index, rows in _rows(logits):
            wanted = None if mask is None else mask[index]
            for chosen in _chunks(rows.shape[0], wanted, ctx.chunk, logits.device):
                d, p = _difference(rows[chosen], reference[index][chosen], outer.dtype, ctx.temperature)
                # Subtract the mean of the same d, not the KL: a rounding error that all d share then cancels.
                if not bool(torch.isfinite(d.sum())):
                    d.masked_fill_(p == 0, 0.0)
                d.sub_(torch.linalg.vecdot(p, d)[:, None]).mul_(p)
                result[index][chosen] = d.mul_(outer[index][chosen][:, None] / ctx.temperature).to(result.dtype)
        return result, None, None, None, None


def _chunks(tokens: int, wanted: Tensor | None, chunk: int, device: torch.device) -> Iterator[Any]:
    """Yield the tokens of each chunk: a slice, or the indices of the wanted ones."""
    if wanted is None or bool(wanted.all()):
        yield from (slice(first, first + chunk) for first in range(0, tokens, chunk))
    elif bool(wanted.any()):
        yield from torch.split(wanted.nonzero()[:, 0].to(device), chunk)


def _difference(logits: Tensor, reference: Tensor, dtype: torch.dtype, temperature: float) -> tuple[Tensor, Tensor]:
    """Return d = log pi - log pi_ref and pi, `[n, V]` each."""
    p = logits.to(dtype, copy=True)
    q = reference.to(dtype, copy=True)
    if temperature != 1.0:
        p /= temperature
        q /= temperature
    p -= p.logsumexp(-1, keepdim=True)
    q -= q.logsumexp(-1, keepdim=True)
    d = torch.sub(p, q, out=q)
    return d, p.exp_()


def _divergence(d: Tensor, p: Tensor, reference: Tensor, temperature: float) -> Tensor:
    """Return the KL of each token `[n]`; `reference` holds the reference's logits, which only the rare case reads."""
    if bool(d.amin() > FAR):
        value: Tensor = torch.linalg.vecdot(p, torch.neg(d).expm1_().add_(d))
        return value
    # Where pi is far below pi_ref, pi underflows although pi exp(-d) = pi_ref counts: write the same term with pi_ref instead.
    # Vocabulary that has no probability on either side (d is NaN, pi_ref is 0) adds nothing.
    q = torch.softmax(reference.to(d.dtype) / temperature, -1)
    near = d.clamp(min=FAR, max=0.0)
    from_q = q * torch.where(d < FAR, 1.0, near.exp().mul_(near).sub_(near.expm1()))
    from_p = p * torch.neg(d.clamp(min=0.0)).expm1_().add_(d.clamp(min=0.0))
    return torch.where((p == 0) & (q == 0), 0.0, torch.where(d < 0, from_q, from_p)).sum(-1)
