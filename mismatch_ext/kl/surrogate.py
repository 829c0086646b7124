"""A loss term whose gradient is that of the KL divergence itself, samples included.

Shapes: B rows, T tokens, S sequences (= B unless rows are packed).
"""

from __future__ import annotations

import torch
from torch import Tensor

from mismatch_ext.config import KlConfig
from mismatch_ext.errors import ConfigError, RecordError
from mismatch_ext.kl.estimators import estimate_from_log_ratio, require_float
from mismatch_ext.kl.inputs import Packing, Tokens, checked_coef, checked_tokens, require_finite


def kl_surrogate(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    config: KlConfig,
    *,
    behavior_logprobs: Tensor | None = None,
    coef: float | None = None,
    sequence_ids: Tensor | None = None,
    groups: Tensor | None = None,
    baseline: Tensor | None = None,
) -> Tensor:
    """Return one differentiable term per token whose summed expected gradient is the configured one.

    With K_t the estimate of `kl_estimate`, sg the stop-gradient, and the weights below,

        term_t = coef [ w_t K_t  +  A_t (log pi_t - sg(log pi_t)) ]

    where w_t K_t is under sg for placement "reward", and the second summand is missing for placement "loss". It is the
    score-function part (arXiv 2512.21852): grad E[sum K] = E[sum_t grad K_t] + E[sum_t A_t grad log pi_t], with

    - target "sequence": A_t = sum of K_s over s >= t. The truth is the gradient of KL(pi||ref) of whole responses.
    - target "token": A_t = K_t. The truth is sum_t E_prefix[grad KL(pi(.|prefix) || ref(.|prefix))], the distribution of
      prefixes held fixed: that of pi for samples of pi or ratio "sequence", that of mu for the others.

    Samples of another policy mu, with rho_t = pi/mu of token t, always under sg:

    - ratio "sequence": c_t = product of rho up to t; w_t = c_t, A_t = sum_{s >= t} c_s K_s. The pair (token t, KL of
      token s) has the mean of the whole response's ratio given the tokens up to s, hence the same expectation at less
      variance. Unbiased for both targets.
    - ratio "token": w_t = rho_t, A_t = rho_t sum_{s >= t} K_s. Unbiased for target "token" (prefixes of mu), biased
      for "sequence".
    - ratio "none": w_t = 1. Unbiased only where mu = pi.

    `config.baseline="leave_one_out"` takes from A_t the mean over the other sequences of the sum in A_t (K_t itself for
    target "token") at the same number of action tokens, times w_t; 0 where no other sequence is as long. Sequences are
    drawn independently, given their prompts, so this keeps the expectation exactly; with ratio "none" off-policy it does
    not, and the configuration is biased anyway.

    Unbiased estimators: k1 in the reward, k1 or k3 in both, and for target "token" k2 in the loss. Every configuration's
    bias and spread, by exact enumeration, is in docs/kl.md.

    The value of the term is coef w_t K_t for every placement, so its mean is a fair log of the weighted estimate; it is
    not the function whose gradient this is. Log `kl_metrics`. Only first derivatives mean anything.

    Aggregate by a sum over tokens divided by a constant, such as the number of sequences: a mean over each response's
    own length, as in GRPO, weighs short responses more and changes the expectation.

    Args:
        logprobs: log pi of the sampled tokens `[B, T]`, nats, any float dtype, with gradient.
        ref_logprobs: log pi_ref of the same tokens `[B, T]`, nats.
        mask: True, or 1, at tokens that the policy sampled `[B, T]`. Nothing is read elsewhere, value and gradient are 0
            there. Holes, such as the output of a tool, are no actions: no KL, no part in a ratio; later KL is credited
            across them.
            Whether a token is masked may depend on the tokens before it only: to mask a response for how it ends, such as
            a truncated one, changes the expectation.
        config: Estimator, placement, target, ratio, baseline and coefficient.
        behavior_logprobs: log mu under the policy that sampled `[B, T]`; needed for a ratio, otherwise checked only.
        coef: Coefficient in place of `config.coef`: the host's own, or a controller's.
        sequence_ids: For rows that hold several sequences, an integer per token `[B, T]`, distinct within a row.
        groups: For the baseline, an integer per sequence `[S]`: only sequences of the same group (prompt) are averaged.
            Packed sequences are ordered by row, then id, without those that are all masked. None is one group.
        baseline: What `kl_baseline` returned for these tokens `[B, T]`, nats, in place of the one that would be taken over the
            sequences given here: for a host that spreads a prompt's over calls.

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
    if sequence_ids is None:
        return (coef * _term(tokens, config, groups, given)).to(tokens.dtype)
    packing = Packing.of(sequence_ids, tokens.mask)
    given = None if given is None else packing.spread(given)
    return (coef * packing.pack(_term(packing.unpack(tokens), config, groups, given))).to(tokens.dtype)


def kl_baseline(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    config: KlConfig,
    *,
    behavior_logprobs: Tensor | None = None,
    groups: Tensor | None = None,
) -> Tensor:
    """Return the leave-one-out baseline of `kl_surrogate` for each token, to be handed to it as `baseline`.

    Args:
        logprobs: log pi of the sampled tokens `[B, T]`, nats; of the policy that starts an update, where there are several.
        ref_logprobs: log pi_ref of the same tokens `[B, T]`, nats.
        mask: True, or 1, at tokens that the policy sampled `[B, T]`.
        config: Estimator, target and ratio.
        behavior_logprobs: log mu under the policy that sampled `[B, T]`; needed for a ratio.
        groups: An integer per sequence `[B]`: only sequences of the same group (prompt) are averaged. None is one group.

    Returns:
        Nats `[B, T]`, detached, float32, or float64 if an input is; 0 under the mask and where no other sequence of the group is
        as long.

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
    # The bracket is zero, with gradient one.
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
    """Return the sum in A_t: the KL from token t on, or that of token t alone."""
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
    # Counting actions, not columns, makes the baseline the same whatever the padding.
    slot = (index.to(mask.device)[:, None] * length + mask.long().cumsum(-1) - 1)[mask]
    chosen = values[mask]
    size = len(number) * length
    total = values.new_zeros(size).index_add(0, slot, chosen)
    count = values.new_zeros(size).index_add(0, slot, torch.ones_like(chosen))
    others = count[slot] - 1
    mean = torch.where(others > 0, (total[slot] - chosen) / others.clamp(min=1), 0.0)
    return torch.zeros_like(values).masked_scatter(mask, mean)
