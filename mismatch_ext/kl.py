"""KL regularization towards a reference policy, with the gradient that it claims.

Policies: pi, the current one; pi_ref, the reference; mu, the one that sampled. Shapes: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from torch.autograd.function import once_differentiable

from mismatch_ext.config import ESTIMATORS, KlConfig, section_of
from mismatch_ext.errors import ConfigError, NonFiniteLogprobError, RecordError
from mismatch_ext.gap import k3 as exact_k3
from mismatch_ext.states import from_json, state, to_json
from mismatch_ext.sums import Sums, merged
from mismatch_ext.tensors import checked_mask, expect_finite, expect_float, output_dtype

# Largest exponent in a loss. The square of e^30 = 1e13, summed over a million tokens, still fits a float32 gradient norm. A
# token that the policy samples exceeds it with a probability below 1e-13.
LARGEST_EXPONENT = 30.0
# float32 elements of a chunk. On a CPU, its two temporaries stay in the shared cache; elsewhere they are 256 MiB.
CPU_CHUNK, CHUNK = 1 << 20, 1 << 26
# exp(-d) overflows float32 at d = -88. If d is above FAR, no entry that matters has underflowed.
FAR = -60.0
PROPORTIONAL = 0.1  # a choice: with errors at their clip, 2 % of the coefficient in the direction of the error
INTEGRAL = 0.05  # a choice: at most 1 % of the coefficient a step
MAX_ERROR = 0.2  # Ziegler et al. 2019
MIN_COEF, MAX_COEF = 1e-6, 10.0  # a choice


# Estimates of each token.


def kl_estimate(*, logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Return a KL estimate of each token, with its own path-wise gradient.

    With d = logprobs - ref_logprobs of a token sampled from the policy pi (Schulman 2020, "Approximating KL
    Divergence"; gradients: "A Comedy of Estimators", arXiv 2512.21852):

    | estimator | value              | gradient w.r.t. logprobs | mean of the value over pi                         |
    |-----------|--------------------|--------------------------|---------------------------------------------------|
    | k1        | d                  | 1                        | KL(pi||ref), exact                                |
    | k2        | d^2 / 2            | d                        | biased: KL + O(d^3)                               |
    | k3        | exp(-d) - 1 + d    | 1 - exp(-d)              | KL(pi||ref), exact if pi > 0 wherever ref > 0     |
    | abs       | abs(d)             | sign(d)                  | biased: at least KL, of order d where KL is d^2   |

    The gradient is that of the value only. The mean of the value has another gradient, because the sampled tokens depend on
    the policy: see `kl_terms`. docs/kl.md has the average of each estimator's own gradient, and its bias.

    Numerics: the difference and everything after it is float64. k3 is `expm1(-d) + d`, or its series where that cancels. Its
    relative error is below 1e-6 down to abs(d) = 1e-6 and less, where `exp(-d) - 1 + d` in float32 is 100 % wrong. For
    d < -30, k3 continues along its tangent at d = -30: the value stays finite in float32 (1.1e17 at d = -1e4) and keeps
    growing, and the gradient stays at 1 - e^30, never zero. verl clamps to +-10 instead, which biases the value and makes
    the gradient zero beyond. The gradient of a float16 `logprobs` is float16 and can still overflow.

    Args:
        logprobs: log pi of the sampled tokens, nats; any shape, any float dtype.
        ref_logprobs: log pi_ref of the same tokens, same shape. A constant: it gets no gradient.
        estimator: One of `ESTIMATORS`, the rows above.

    Returns:
        The estimates in nats, same shape, float32, or float64 if an input is float64. NaN and infinity give a value that is
        not finite; `kl_terms` refuses them instead.

    Raises:
        ConfigError: Unknown estimator; for `full`, which needs logits, use `kl_full`.
        RecordError: Shapes differ, or an input is not floating point.
    """
    if estimator not in ESTIMATORS:
        full = "; 'full' needs logits, use kl_full" if estimator == "full" else ""
        raise ConfigError(f"estimator {estimator!r} is not allowed; allowed: {', '.join(ESTIMATORS)}{full}.")
    if logprobs.shape != ref_logprobs.shape:
        raise RecordError(
            f"logprobs {list(logprobs.shape)}, ref_logprobs {list(ref_logprobs.shape)}: the two must have one shape."
        )
    expect_float(logprobs=logprobs, ref_logprobs=ref_logprobs)
    estimate: Tensor = _Estimate.apply(logprobs.double() - ref_logprobs.detach().double(), estimator)
    return estimate.to(output_dtype(logprobs, ref_logprobs))


class _Estimate(torch.autograd.Function):
    """Value and derivative of an estimate, each in a form that does not cancel."""

    @staticmethod
    def forward(ctx: Any, log_ratio: Tensor, estimator: str) -> Tensor:
        value, derivative = _value_and_derivative(log_ratio, estimator)
        ctx.save_for_backward(derivative)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (derivative,) = ctx.saved_tensors
        return grad * derivative, None


def _value_and_derivative(d: Tensor, estimator: str) -> tuple[Tensor, Tensor]:
    """Return the estimate of d and its derivative; CONTRIBUTING.md lists what else a new estimator needs."""
    if estimator == "k1":
        return d.clone(), torch.ones_like(d)
    if estimator == "k2":
        return 0.5 * d * d, d.clone()
    if estimator == "abs":
        return d.abs(), d.sign()
    if estimator == "k3":
        cut = (-d).clamp(max=LARGEST_EXPONENT)
        beyond = (-d - LARGEST_EXPONENT).clamp(min=0)
        return exact_k3(cut) + beyond * math.expm1(LARGEST_EXPONENT), -torch.expm1(cut)
    raise ConfigError(f"estimator {estimator!r} has no formula; allowed: {', '.join(ESTIMATORS)}.")


# Terms of a loss and of rewards.


class KlTerms(NamedTuple):
    """The two parts of a KL term `[B, T]`, coefficient included: to add to the per-token loss, and to take off the rewards."""

    loss: Tensor
    reward: Tensor


def kl_terms(
    *,
    logprobs: Tensor,
    ref_logprobs: Tensor | None,
    mask: Tensor,
    settings: KlConfig | Mapping[str, Any] | str,
    behavior: Tensor | None = None,
    coef: float | None = None,
    groups: Tensor | None = None,
    baseline: Tensor | None = None,
    logits: tuple[Tensor, Tensor] | None = None,
    temperature: float = 1.0,
) -> KlTerms:
    """Return the KL term of each sampled token, for the loss and for the rewards.

    With K_t the estimate of `kl_estimate`, sg the stop-gradient, and the weights below,

        loss_t = coef [ w_t K_t  +  A_t (log pi_t - sg(log pi_t)) ],    reward_t = 0

    For placement "reward", w_t K_t is under sg; for placement "loss", the second summand is left out. The second summand is
    the score-function part (arXiv 2512.21852): grad E[sum K] = E[sum_t grad K_t] + E[sum_t A_t grad log pi_t], with

    - target "sequence": A_t = sum of K_s over s >= t. The true gradient is that of KL(pi||ref) of whole responses.
    - target "token": A_t = K_t. The true gradient is sum_t E_prefix[grad KL(pi(.|prefix) || ref(.|prefix))], with the
      distribution of prefixes held fixed: pi's for samples of pi or ratio "sequence", mu's for the others.

    For samples of another policy mu, with rho_t = pi/mu of token t, always under sg:

    - ratio "sequence": c_t = product of rho up to t; w_t = c_t, A_t = sum_{s >= t} c_s K_s. The weight c_s of the pair
      (token t, KL of token s) is the mean of the whole response's ratio given the tokens up to s. The expectation is therefore
      the same, with less variance. Unbiased for both targets.
    - ratio "token": w_t = rho_t, A_t = rho_t sum_{s >= t} K_s. Unbiased for target "token" (prefixes of mu), biased
      for "sequence".
    - ratio "none": w_t = 1. Unbiased only where mu = pi.

    `baseline="leave_one_out"` subtracts from A_t w_t times the mean over the other sequences of the sum in A_t (K_t itself for
    target "token") at the same number of action tokens; 0 if no other sequence is as long. Given their prompts, sequences are
    drawn independently, so this keeps the expectation exactly. With ratio "none" off-policy it does not, but that
    configuration is biased anyway.

    Estimator "full" is exact over each token and sampled over prefixes only (Rao-Blackwell). K_t is the KL divergence of token
    t's distribution and already an expectation over token t, so A_t is the sum over later tokens, s > t. For target "token" it
    is 0. Ratio "sequence" weighs K_s by c_{s-1}, the ratio of its prefix, and is unbiased. Ratio "token" leaves w_t = 1 and
    weighs A_t by rho_t: biased for target "sequence". Placement "loss" lacks the credit for target "sequence"; placement
    "reward" lacks the path-wise part.

    If `settings.in_rewards`, the trainer gives the score-function part its own credit and baseline:

        loss_t = coef K_t for placement "both", else 0;    reward_t = coef K_t

    Both parts carry the full coefficient. Half of it in each place would halve the regularization. A trainer that divides
    rewards or advantages by their spread rescales the reward part and so biases it; the loss term is not rescaled. Off-policy,
    the reward is unbiased if the trainer weighs it by the ratio of the whole response.

    Unbiased: k1 in the reward, k1 or k3 in both, "full" in both, and for target "token" k2 in the loss. docs/kl.md has every
    configuration's bias and spread, by exact enumeration.

    The value of `loss` is coef w_t K_t for every placement, so its mean measures the weighted estimate; but its gradient is not
    the gradient of that value. Only first derivatives mean anything. Aggregate by a sum over tokens divided by a constant, such
    as the number of sequences. A mean over each response's own length, as in GRPO, gives short responses more weight and
    changes the expectation.

    Args:
        logprobs: log pi of the sampled tokens `[B, T]`, or of one sequence `[T]`, nats, any float dtype, with gradient. All other
            tensors, and the result, have as many dimensions.
        ref_logprobs: log pi_ref of the same tokens `[B, T]`, nats; None for estimator "full".
        mask: True, or 1, at tokens that the policy sampled `[B, T]`. Other tokens are not read; their value and gradient are
            0. Holes, such as the output of a tool, are not actions: they have no KL and no part in a ratio, and later KL is
            credited across them. Whether a token is masked may depend only on the tokens before it: masking a response
            because of how it ends, for example because it was truncated, changes the expectation.
        settings: The `kl` section, a mapping of its keys, or an estimator's name, whose coefficient is 1.
        behavior: log mu of the same tokens `[B, T]`, nats; needed for a ratio, otherwise checked only.
        coef: Coefficient to use instead of `settings.coef`: the trainer's own, or a controller's (`kl_step`).
        groups: For the baseline, an integer per sequence `[B]`: only sequences of the same group (prompt) are averaged. None
            is one group.
        baseline: What `kl_baseline` returned for these tokens `[B, T]`, nats. It replaces the baseline over the sequences given
            here, for a trainer that spreads the sequences of a prompt over several calls.
        logits: For estimator "full", the policy's logits `[B, T, V]`, with gradient, and the reference's.
        temperature: Divides those logits first.

    Returns:
        `KlTerms`, each float32, or float64 if an input is. Ratios are cut at exp(30) and k3 continues along its tangent beyond,
        so that all is finite up to a log-ratio of 1e4.

    Raises:
        ConfigError: No coefficient; a ratio without `behavior`; estimator "full" without `logits` or with `baseline`; another one
            without `ref_logprobs`; a baseline where `settings.baseline` is "none".
        RecordError: Shapes or dtypes do not fit.
        NonFiniteLogprobError: NaN or infinity in an unmasked position; names tensor, row and position. A reference
            log-probability of -inf is an infinite KL and is refused as well.
    """
    if isinstance(settings, str) and coef is None:
        coef = 1.0
    settings = section_of(KlConfig, settings, "settings", "estimator")
    if logprobs.dim() == 1:
        reference, mu, of_tokens = (None if x is None else x[None] for x in (ref_logprobs, behavior, baseline))
        pair = None if logits is None else (logits[0][None], logits[1][None])
        terms = kl_terms(
            logprobs=logprobs[None], ref_logprobs=reference, mask=mask[None], settings=settings,
            behavior=mu, coef=coef, groups=groups, baseline=of_tokens, logits=pair, temperature=temperature,
        )  # fmt: skip
        return KlTerms(terms.loss[0], terms.reward[0])
    coef = _checked_coef(settings, coef)
    tokens = _checked_tokens(
        logprobs=logprobs, ref_logprobs=ref_logprobs, mask=mask, settings=settings, behavior=behavior
    )
    weight = _weights(tokens, settings)
    if settings.estimator == "full":
        if logits is None or baseline is not None:
            raise ConfigError(
                "mismatch.kl.estimator='full' needs the logits of policy and reference, and no baseline; use "
                f"{', '.join(ESTIMATORS)} where you have log-probabilities alone."
            )
        policy, reference = logits
        estimate = kl_full(logits=policy, ref_logits=reference, mask=tokens.mask, temperature=temperature).double()
        value = _prefix_weights(weight, settings) * estimate
        later = value.detach().flip(-1).cumsum(-1).flip(-1) - value.detach()
        credits = settings.applied_placement != "loss" and settings.target == "sequence"
    else:
        estimate = _Estimate.apply(tokens.logprobs - tokens.ref_logprobs, settings.estimator)
        value = weight * estimate
        later = _later_kl(estimate.detach(), weight, settings)
        credits = settings.applied_placement != "loss"
    if settings.in_rewards:
        # With placement "reward", the loss stays connected to the graph, so that you can always call backward.
        loss = coef * value if settings.applied_placement == "both" else estimate * 0
        return KlTerms(loss.to(tokens.dtype), (coef * estimate.detach()).to(tokens.dtype))
    if settings.applied_placement == "reward":
        value = value.detach()
    if credits:
        credit = weight * later if settings.ratio == "token" else later
        if baseline is not None:
            credit = credit - weight * _checked_baseline(baseline, tokens.mask, settings)
        elif settings.baseline == "leave_one_out":
            credit = credit - weight * _mean_of_others(later, tokens.mask, groups)
        # The value of the bracket is zero, its gradient one.
        value = value + credit * (tokens.logprobs - tokens.logprobs.detach())
    return KlTerms((coef * value).to(tokens.dtype), torch.zeros_like(value, dtype=tokens.dtype, requires_grad=False))


def kl_baseline(
    *,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    settings: KlConfig | Mapping[str, Any] | str,
    behavior: Tensor | None = None,
    groups: Tensor | None = None,
) -> Tensor:
    """Return the leave-one-out baseline `[B, T]`, nats, of `kl_terms`, under the policy at the start of an update.

    No response's baseline depends on that response, so that it keeps the expectation while the policy moves.
    """
    settings = section_of(KlConfig, settings, "settings", "estimator")
    tokens = _checked_tokens(
        logprobs=logprobs.detach(), ref_logprobs=ref_logprobs, mask=mask, settings=settings, behavior=behavior
    )
    estimate: Tensor = _Estimate.apply(tokens.logprobs - tokens.ref_logprobs, settings.estimator)
    later = _later_kl(estimate, _weights(tokens, settings), settings)
    return _mean_of_others(later, tokens.mask, groups).to(tokens.dtype)


class _Tokens(NamedTuple):
    """Checked inputs in float64 `[B, T]`, exactly 0 at masked tokens; `logprobs` alone has a gradient."""

    mask: Tensor
    logprobs: Tensor
    ref_logprobs: Tensor
    behavior: Tensor | None
    dtype: torch.dtype


def _checked_tokens(
    *, logprobs: Tensor, ref_logprobs: Tensor | None, mask: Tensor, settings: KlConfig, behavior: Tensor | None
) -> _Tokens:
    """Check shapes, dtypes and unmasked values, and set masked values to 0."""
    if settings.ratio != "none" and behavior is None:
        raise ConfigError(
            f"mismatch.kl.ratio={settings.ratio!r} needs behavior, the log-probabilities under the policy that sampled; pass "
            "them, or set ratio='none' when the policy itself sampled."
        )
    if settings.estimator == "full":
        ref_logprobs = logprobs.detach()
    if ref_logprobs is None:
        raise ConfigError(
            f"mismatch.kl.estimator={settings.estimator!r} needs log-probabilities under the reference; let the trainer "
            "score one, or leave out mismatch.kl."
        )
    tensors = {"logprobs": logprobs, "ref_logprobs": ref_logprobs}
    if behavior is not None:
        tensors["behavior"] = behavior
    mask = checked_mask("mask", mask, "[B, T]", **tensors)
    expect_finite(mask, **{name: values.detach() for name, values in tensors.items()})
    # `where` comes before any arithmetic, so that NaN * 0 enters neither values nor gradients.
    policy, *constants = (torch.where(mask, tensor, 0.0).double() for tensor in tensors.values())
    reference, *mu = (tensor.detach() for tensor in constants)
    return _Tokens(mask, policy, reference, mu[0] if mu else None, output_dtype(*tensors.values()))


def _checked_coef(settings: KlConfig, coef: float | None) -> float:
    chosen = settings.coef if coef is None else coef
    if chosen is None:
        raise ConfigError("mismatch.kl.coef is not set; set it, or pass coef= (the trainer's own, or a controller's).")
    if not (math.isfinite(chosen) and chosen >= 0):
        raise ConfigError(f"coef {chosen!r} is not allowed; allowed: a finite number >= 0.")
    return chosen


def _checked_baseline(baseline: Tensor, mask: Tensor, settings: KlConfig) -> Tensor:
    if settings.baseline == "none":
        raise ConfigError("mismatch.kl.baseline='none', and a baseline is given; leave it out, or set 'leave_one_out'.")
    if baseline.shape != mask.shape:
        raise RecordError(
            f"baseline {list(baseline.shape)} does not fit logprobs {list(mask.shape)}; it must be [B, T]."
        )
    expect_float(baseline=baseline)
    expect_finite(mask, baseline=baseline.detach())
    return torch.where(mask, baseline.detach(), 0.0).double()


def _weights(tokens: _Tokens, settings: KlConfig) -> Tensor:
    """Return the detached ratio of each token: 1, pi/mu, or the product of pi/mu up to and including the token, cut at e^30."""
    if settings.ratio == "none" or tokens.behavior is None:
        return torch.ones_like(tokens.ref_logprobs)
    steps = tokens.logprobs.detach() - tokens.behavior
    log_ratio = steps.cumsum(-1) if settings.ratio == "sequence" else steps
    return log_ratio.clamp(max=LARGEST_EXPONENT).exp()


def _prefix_weights(weight: Tensor, settings: KlConfig) -> Tensor:
    """Return the ratio of each token's prefix, for an exact KL; 1 unless the ratio is that of the sequence."""
    if settings.ratio != "sequence":
        return torch.ones_like(weight)
    return torch.cat([torch.ones_like(weight[:, :1]), weight[:, :-1]], dim=1)


def _later_kl(estimate: Tensor, weight: Tensor, settings: KlConfig) -> Tensor:
    """Return the sum in A_t: the KL from token t on, or only the KL of token t."""
    kl = weight * estimate if settings.ratio == "sequence" else estimate
    return kl.flip(-1).cumsum(-1).flip(-1) if settings.target == "sequence" else kl


def _mean_of_others(values: Tensor, mask: Tensor, groups: Tensor | None) -> Tensor:
    """Return for each token the mean over the group's other sequences at the same number of action tokens, or 0."""
    rows, length = mask.shape
    if groups is None:
        groups = torch.zeros(rows, dtype=torch.long, device=mask.device)
    elif groups.shape != (rows,) or groups.is_floating_point():
        raise RecordError(
            f"groups {list(groups.shape)} of {groups.dtype}: one integer per sequence is needed, [{rows}]."
        )
    number, index = torch.unique(groups, return_inverse=True)
    # Positions count actions, not columns, so that padding does not change the baseline.
    slot = (index.to(mask.device)[:, None] * length + mask.long().cumsum(-1) - 1)[mask]
    chosen = values[mask]
    size = len(number) * length
    total = values.new_zeros(size).index_add(0, slot, chosen)
    count = values.new_zeros(size).index_add(0, slot, torch.ones_like(chosen))
    others = count[slot] - 1
    mean = torch.where(others > 0, (total[slot] - chosen) / others.clamp(min=1), 0.0)
    return torch.zeros_like(values).masked_scatter(mask, mean)


def ragged_bias(settings: KlConfig | None, setting: str, instead: str) -> str | None:
    """Return a warning if a term of the loss is averaged over each response's tokens by the trainer's `setting`, else None."""
    if settings is None or not settings.in_loss:
        return None
    return (
        f"mismatch.kl with {setting}: the loss averages over the tokens of each response, so that the KL of short responses "
        "counts more. Enumerated on a toy policy, 27 to 32 % of the gradient is lost at any batch size (docs/kl.md). Use "
        f"{instead}."
    )


# The exact divergence over the vocabulary, without a second tensor of the logits' size.


def kl_full(*, logits: Tensor, ref_logits: Tensor, mask: Tensor | None = None, temperature: float = 1.0) -> Tensor:
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
                d, p = _difference(
                    logits=rows[chosen], reference=reference[index][chosen], dtype=dtype, temperature=temperature
                )
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
                d, p = _difference(
                    logits=rows[chosen],
                    reference=reference[index][chosen],
                    dtype=outer.dtype,
                    temperature=ctx.temperature,
                )
                # Subtract the mean of the same d, not the KL: a rounding error that all d share then cancels.
                if not bool(torch.isfinite(d.sum())):
                    d.masked_fill_(p == 0, 0.0)
                d.sub_(torch.linalg.vecdot(p, d)[:, None]).mul_(p)
                result[index][chosen] = d.mul_(outer[index][chosen][:, None] / ctx.temperature).to(result.dtype)
        return result, None, None, None, None


def _rows(tensor: Tensor) -> Iterator[tuple[Any, Tensor]]:
    """Yield index and view `[T, V]` for each leading index, because flattening a slice of a batch would copy all of it."""
    if tensor.dim() == 2:
        yield ..., tensor
        return
    for index in range(tensor.shape[0]):
        for rest, view in _rows(tensor[index]):
            yield (index,) if rest is ... else (index, *rest), view


def _chunks(tokens: int, wanted: Tensor | None, chunk: int, device: torch.device) -> Iterator[Any]:
    """Yield the tokens of each chunk: a slice, or the indices of the wanted ones."""
    if wanted is None or bool(wanted.all()):
        yield from (slice(first, first + chunk) for first in range(0, tokens, chunk))
    elif bool(wanted.any()):
        yield from torch.split(wanted.nonzero()[:, 0].to(device), chunk)


def _difference(*, logits: Tensor, reference: Tensor, dtype: torch.dtype, temperature: float) -> tuple[Tensor, Tensor]:
    """Return d = log pi - log pi_ref and pi, `[tokens, V]` each."""
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
    """Return the KL of each token; `reference` holds the reference's logits, which only the rare case reads."""
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


# Measured KL, and the coefficient that follows it.


def kl_sums(*, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Sums:
    """Return the sums of k1 and of k3, nats, over the tokens of a part of a batch, and the number of these tokens."""
    chosen = mask.bool()
    policy, reference = logprobs.detach()[chosen], ref_logprobs.detach()[chosen]
    estimates = (
        kl_estimate(logprobs=policy, ref_logprobs=reference, estimator=name).double().sum() for name in ("k1", "k3")
    )
    k1, k3, tokens = torch.stack([*estimates, chosen.sum().double()]).cpu()
    return {"kl_k1": k1, "kl_k3": k3, "kl_tokens": tokens}


def kl_means(sums: Sums) -> dict[str, float]:
    """Return `kl_ref_k1` and `kl_ref_k3`, the mean of k1 and of k3 per token, nats; 0 without tokens."""
    tokens = max(float(sums["kl_tokens"]), 1.0)
    return {f"kl_ref_{name}": float(sums[f"kl_{name}"]) / tokens for name in ("k1", "k3")}


@state
class KlState:
    """What `kl_step` carries from step to step; `integral` is the sum of errors times its gain, in nats of log-coefficient."""

    initial: Annotated[float, Field(gt=0)]
    coef: Annotated[float, Field(ge=0)]
    integral: float = 0.0
    steps: Annotated[int, Field(ge=0)] = 0


def kl_step(state: KlState, measured: float, settings: KlConfig) -> tuple[KlState, float]:
    """Return the state and the coefficient after a measurement: constant, or led by a PI controller towards `target_kl`.

        e = clip(measured / target_kl - 1, +-0.2)           relative error, as in Ziegler et al. 2019 (arXiv 1909.08593)
        integral += 0.05 e                                  undone if e pushes log coef below further out of bounds
        log coef = log initial + integral + 0.1 e           then clipped to [1e-6, 10]

    `measured` is in nats per token, and may be negative as an estimate; RecordError if it is not finite.
    """
    if settings.target_kl is None:
        return replace(state, steps=state.steps + 1), state.coef
    if not math.isfinite(measured):
        raise RecordError(
            f"the measured KL is {measured} after {state.steps} measurements; a coefficient cannot be led by it. Look for "
            "broken weights or an overflow in the log-probabilities."
        )
    error = min(max(measured / settings.target_kl - 1, -MAX_ERROR), MAX_ERROR)
    low, high = math.log(MIN_COEF), math.log(MAX_COEF)
    integral = state.integral + INTEGRAL * error
    wanted = math.log(state.initial) + integral + PROPORTIONAL * error
    if (wanted > high and error > 0) or (wanted < low and error < 0):
        integral = state.integral
    if wanted >= high:
        coef = MAX_COEF
    else:
        coef = math.exp(wanted) if wanted > low else MIN_COEF
    return KlState(initial=state.initial, coef=coef, integral=integral, steps=state.steps + 1), coef


class KlTerm:
    """The coefficient of a run's KL term: one for each batch, and from the batch's KL the next one's. Raises ConfigError.

    term.begin()                                            # a fresh batch
    term.add(over_ranks(kl_sums(...), ranks))               # for each of its parts
    kl_terms(..., settings=term.config, coef=term.coef)     # for each micro-batch
    """

    def __init__(self, config: KlConfig, coef: float) -> None:
        if not (math.isfinite(coef) and coef > 0):
            raise ConfigError(f"mismatch.kl.coef: {coef!r} is not allowed to start from; allowed: a number > 0.")
        self.config = config
        if self.adaptive and not MIN_COEF <= coef <= MAX_COEF:
            raise ConfigError(
                f"mismatch.kl.coef: {coef!r} is not allowed with target_kl; allowed: {MIN_COEF:g} to {MAX_COEF:g}."
            )
        self._start(KlState(initial=coef, coef=coef))

    def _start(self, state: KlState) -> None:
        self.state, self.coef = state, state.coef
        self._added: list[Sums] = []

    @property
    def adaptive(self) -> bool:
        """Whether the coefficient follows a target."""
        return self.config.target_kl is not None

    def begin_anew(self) -> None:
        """Go back to the first coefficient, for a training that starts again."""
        self._start(KlState(initial=self.state.initial, coef=self.state.initial))

    def follow(self, coef: float) -> None:
        """Take the coefficient that the trainer has now, which a callback may change between steps; 0 is no term."""
        if not self.adaptive:
            self.state, self.coef = replace(self.state, coef=coef), coef
        elif coef != self.state.initial:
            raise ConfigError(
                f"mismatch.kl.target_kl, and the trainer's coefficient was changed from {self.state.initial:g} to "
                f"{coef:g}: the controller leads it. Remove target_kl, or what changes the coefficient."
            )

    def begin(self) -> None:
        """Start a batch, with the coefficient to which the batches before it have led."""
        self.update()
        self.coef = self.state.coef

    def add(self, sums: Sums) -> dict[str, float]:
        """Take the sums of a part of the batch over all ranks, and return what to log of it."""
        self._added.append(sums)
        return self.measured(sums)

    def measured(self, sums: Sums) -> dict[str, float]:
        """Return what to log of a part of the batch that does not lead the coefficient."""
        return {**kl_means(sums), "kl_coef": self.coef}

    def update(self) -> None:
        """Let the parts that were added lead the next batch's coefficient, all together and only once."""
        added, self._added = self._added, []
        if added and float((whole := merged(*added))["kl_tokens"]):
            self.state, _ = kl_step(self.state, kl_means(whole)["kl_ref_k1"], self.config)

    def behavior(self, logprobs: Tensor, *, old: Tensor | None, rollout: Tensor | None) -> Tensor | None:
        """Return log-probabilities under the policy that sampled, if a ratio needs them: the engine's, else the old ones."""
        if self.config.ratio == "none":
            return None
        return next((known for known in (rollout, old) if known is not None), logprobs.detach())

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON-able data, after what was added."""
        self.update()
        return to_json(self.state)

    def load_state_dict(self, state: Mapping[str, Any]) -> str | None:
        """Go on from a saved state; return a sentence if the coefficient begins anew, as the first one was another."""
        saved, initial = from_json(KlState, state, "kl"), self.state.initial
        if saved.initial == initial and self.adaptive:
            self._start(saved)
            return None
        self._start(KlState(initial=initial, coef=initial))
        if saved.initial == initial:  # a trainer's schedule may have moved a constant one since, and will again
            return None
        return (
            f"mismatch.kl.coef was {saved.initial:g} and is {initial:g}: the coefficient begins anew from {initial:g}."
        )
