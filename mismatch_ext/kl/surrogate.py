"""A loss term whose gradient is that of the KL divergence itself, including its dependence on which tokens are sampled.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mismatch_ext.config import KlConfig
from mismatch_ext.errors import ConfigError, RecordError
from mismatch_ext.kl.estimators import estimate_from_log_ratio, require_float
from mismatch_ext.kl.inputs import Tokens, checked_coef, checked_tokens, require_finite


def kl_surrogate(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    config: KlConfig,
    *,
    behavior_logprobs: Tensor | None = None,
    coef: float | None = None,
    groups: Tensor | None = None,
    baseline: Tensor | None = None,
) -> Tensor:
    """Return one differentiable term per token whose summed expected gradient is the configured one.

    With K_t the estimate of `kl_estimate`, sg the stop-gradient, and the weights below,

        term_t = coef [ w_t K_t  +  A_t (log pi_t - sg(log pi_t)) ]

    For placement "reward", w_t K_t is under sg; for placement "loss", the second summand is left out. The second summand is
    the score-function part (arXiv 2512.21852): grad E[sum K] = E[sum_t grad K_t] + E[sum_t A_t grad log pi_t], with

    - target "sequence": A_t = sum of K_s over s >= t. The true gradient is that of KL(pi||ref) of whole responses.
    - target "token": A_t = K_t. The true gradient is sum_t E_prefix[grad KL(pi(.|prefix) || ref(.|prefix))], with the
      distribution of prefixes held fixed: pi's for samples of pi or ratio "sequence", mu's for the others.

    For samples of another policy mu, with rho_t = pi/mu of token t, always under sg:

    - ratio "sequence": c_t = product of rho up to t; w_t = c_t, A_t = sum_{s >= t} c_s K_s. The weight c_s of the pair
      (token t, KL of token s) is the mean of the whole response's ratio given the tokens up to s. The expectation is
      therefore the same, with less variance. Unbiased for both targets.
    - ratio "token": w_t = rho_t, A_t = rho_t sum_{s >= t} K_s. Unbiased for target "token" (prefixes of mu), biased
      for "sequence".
    - ratio "none": w_t = 1. Unbiased only where mu = pi.

    `config.baseline="leave_one_out"` subtracts a baseline from A_t: w_t times the mean over the other sequences of the sum in
    A_t (K_t itself for target "token") at the same number of action tokens; 0 if no other sequence is as long. Given their
    prompts, sequences are drawn independently, so this keeps the expectation exactly. With ratio "none" off-policy it does
    not, but that configuration is biased anyway.

    Unbiased estimators: k1 in the reward, k1 or k3 in both, and for target "token" k2 in the loss. docs/kl.md has every
    configuration's bias and spread, by exact enumeration.

    The value of the term is coef w_t K_t for every placement, so its mean measures the weighted estimate; but the gradient
    is not the gradient of that value. Only first derivatives mean anything.

    Aggregate by a sum over tokens divided by a constant, such as the number of sequences. A mean over each response's own
    length, as in GRPO, gives short responses more weight and changes the expectation.

    Args:
        logprobs: log pi of the sampled tokens `[B, T]`, nats, any float dtype, with gradient.
        ref_logprobs: log pi_ref of the same tokens `[B, T]`, nats.
        mask: True, or 1, at tokens that the policy sampled `[B, T]`. Other tokens are not read; their value and gradient are
            0. Holes, such as the output of a tool, are not actions: they have no KL and no part in a ratio, and later KL is
            credited across them. Whether a token is masked may depend only on the tokens before it: masking a response
            because of how it ends, for example because it was truncated, changes the expectation.
        config: Estimator, placement, target, ratio, baseline and coefficient.
        behavior_logprobs: log mu under the policy that sampled `[B, T]`; needed for a ratio, otherwise checked only.
        coef: Coefficient to use instead of `config.coef`: the host's own, or a controller's.
        groups: For the baseline, an integer per sequence `[B]`: only sequences of the same group (prompt) are averaged.
            None is one group.
        baseline: What `kl_baseline` returned for these tokens `[B, T]`, nats. It replaces the baseline over the sequences given
            here, for a host that spreads the sequences of a prompt over several calls.

    Returns:
        Terms `[B, T]` to be added to a loss that is minimised, float32, or float64 if an input is. Ratios are cut at
        exp(30) and k3 continues along its tangent beyond, so that all is finite up to a log-ratio of 1e4.

    Raises:
        ConfigError: No coefficient; a ratio without `behavior_logprobs`; estimator "full"; a baseline where `config.baseline` is
            "none".
        RecordError: Shapes or dtypes do not fit.
        NonFiniteLogprobError: NaN or infinity in an unmasked position; names tensor, row and position. A reference
            log-probability of -inf is an infinite KL and is refused as well.
    """
    coef = checked_coef(config, coef, behavior_logprobs)
    tokens = checked_tokens(logprobs, ref_logprobs, mask, behavior_logprobs)
    given = None if baseline is None else _checked_baseline(baseline, tokens, config)
    return (coef * _term(tokens, config, groups, given)).to(tokens.dtype)


def kl_baseline(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    config: KlConfig,
    *,
    behavior_logprobs: Tensor | None = None,
    groups: Tensor | None = None,
) -> Tensor:
    """Return the leave-one-out baseline of each token, for the argument `baseline` of `kl_surrogate`.

    Args:
        logprobs: log pi of the sampled tokens `[B, T]`, nats, under the policy at the start of an update.
        ref_logprobs: log pi_ref of the same tokens `[B, T]`, nats.
        mask: True, or 1, at tokens that the policy sampled `[B, T]`.
        config: Estimator, target and ratio.
        behavior_logprobs: log mu under the policy that sampled `[B, T]`; needed for a ratio.
        groups: An integer per sequence `[B]`: only sequences of the same group (prompt) are averaged. None is one group.

    Returns:
        Nats `[B, T]`, detached, float32, or float64 if an input is; 0 at masked tokens, and where no other sequence of the
        group is as long.

    Raises:
        ConfigError, RecordError, NonFiniteLogprobError: As `kl_surrogate`.
    """
    checked_coef(config, 1.0, behavior_logprobs)
    tokens = checked_tokens(logprobs.detach(), ref_logprobs, mask, behavior_logprobs)
    estimate = estimate_from_log_ratio(tokens.logprobs - tokens.ref_logprobs, config.estimator)
    later = _later_kl(config, estimate, tokens.ratio(config.ratio))
    return mean_of_others(later, tokens.mask, groups).to(tokens.dtype)


def _checked_baseline(baseline: Tensor, tokens: Tokens, config: KlConfig) -> Tensor:
    if config.baseline == "none":
        raise ConfigError("mismatch.kl.baseline='none', and a baseline is given; leave it out, or set 'leave_one_out'.")
    if baseline.shape != tokens.mask.shape:
        raise RecordError(
            f"baseline {list(baseline.shape)} does not fit logprobs {list(tokens.mask.shape)}; it must be [B, T]."
        )
    require_float("baseline", baseline)
    require_finite("baseline", baseline.detach(), tokens.mask)
    return torch.where(tokens.mask, baseline.detach(), 0.0).double()


def _term(tokens: Tokens, config: KlConfig, groups: Tensor | None, baseline: Tensor | None) -> Tensor:
    weight = tokens.ratio(config.ratio)
    estimate = estimate_from_log_ratio(tokens.logprobs - tokens.ref_logprobs, config.estimator)
    value = weight * estimate
    if config.placement == "loss":
        return value
    credit = _credit(tokens, config, estimate.detach(), weight, groups, baseline)
    # The value of the bracket is zero, its gradient one.
    score = credit * (tokens.logprobs - tokens.logprobs.detach())
    return score + (value if config.placement == "both" else value.detach())


def _credit(
    tokens: Tokens, config: KlConfig, estimate: Tensor, weight: Tensor, groups: Tensor | None, baseline: Tensor | None
) -> Tensor:
    """Return A_t, the KL that the choice of token t is held responsible for."""
    kl = _later_kl(config, estimate, weight)
    credit = weight * kl if config.ratio == "token" else kl
    if config.baseline == "leave_one_out":
        credit = credit - weight * (mean_of_others(kl, tokens.mask, groups) if baseline is None else baseline)
    return credit


def _later_kl(config: KlConfig, estimate: Tensor, weight: Tensor) -> Tensor:
    """Return the sum in A_t: the KL from token t on, or only the KL of token t."""
    kl = weight * estimate if config.ratio == "sequence" else estimate
    return kl.flip(-1).cumsum(-1).flip(-1) if config.target == "sequence" else kl


def mean_of_others(values: Tensor, mask: Tensor, groups: Tensor | None) -> Tensor:
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
