"""The KL term as a loss, as a reward, or as both, for a host that aggregates losses and credits rewards itself.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mismatch_ext.config import KlConfig
from mismatch_ext.errors import ConfigError
from mismatch_ext.kl.estimators import LARGEST_EXPONENT, estimate_from_log_ratio
from mismatch_ext.kl.inputs import Packing, Tokens, checked_coef, checked_tokens


@dataclass(frozen=True, kw_only=True, eq=False)
class KlPenalty:
    """A KL penalty, split into the part for the loss and the part for the rewards.

    Args:
        loss: The host adds it to the per-token loss before its own aggregation `[B, T]`, differentiable.
        reward: The host subtracts it from the token rewards `[B, T]`, detached.
        metrics: See `kl_metrics`.
    """

    loss: Tensor
    reward: Tensor
    metrics: dict[str, Tensor]


def kl_penalty(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    config: KlConfig,
    *,
    behavior_logprobs: Tensor | None = None,
    coef: float | None = None,
    sequence_ids: Tensor | None = None,
) -> KlPenalty:
    """Return the configured KL penalty of each token, coefficient included.

    With K_t the estimate of `kl_estimate` and w_t the detached importance ratio (1, pi/mu, or its product up to t):

        loss_t   = coef w_t K_t    for placement "loss" and "both", otherwise 0
        reward_t = coef K_t        for placement "reward" and "both", otherwise 0

    "both" uses the full coefficient in both places: by the product rule, the gradient of E[sum K] is E[sum grad K] plus
    E[sum K grad log pi] (arXiv 2512.21852). Half of the coefficient in each place would halve the regularisation.

    The reward is the KL of the token itself. A host with returns (or GAE, or one reward per sequence) credits it to the
    earlier tokens too, so its target is "sequence". A reward therefore cannot have the target "token", which is refused; use
    `kl_surrogate` for that. A host that divides rewards or advantages by their spread rescales the reward part and so biases
    it; the term of `kl_surrogate` is not rescaled.

    Off-policy, the reward carries no ratio, because a host that corrects its policy gradient already weighs the reward. With
    target "sequence", this is unbiased if the host weighs by the ratio of the whole response. If it weighs by the ratio of
    the token or the prefix only, the KL of later tokens stays weighted as the rollout policy samples it. The loss carries its
    own ratio, because hosts add it unweighted.

    Gradients, averaged over samples of pi (these statements are exact; sizes are in docs/kl.md): k1 in the reward, k1 in both
    and k3 in both are unbiased for KL(pi||ref) of sequences. k1 in the loss is zero-mean noise. k2 in the loss regularises
    tokens but credits nothing to earlier ones. k3 in the loss is the gradient of KL(ref||pi) of tokens. k3 in the reward is
    the gradient of KL(pi||ref) without exactly this part. k2 and abs in both regularise E[K], which is not the KL.

    Args:
        logprobs: log pi of the sampled tokens `[B, T]`, nats, any float dtype, with gradient.
        ref_logprobs: log pi_ref of the same tokens `[B, T]`, nats.
        mask: True, or 1, at tokens that the policy sampled `[B, T]`. Other tokens are not read; their value and gradient are
            0. Holes, such as the output of a tool, are not actions: they have no KL and no part in a ratio.
        config: Estimator, placement, target, ratio and coefficient.
        behavior_logprobs: log mu under the policy that sampled `[B, T]`; needed for a ratio, otherwise checked only.
        coef: Coefficient to use instead of `config.coef`: the host's own, or a controller's.
        sequence_ids: For rows that hold several sequences, an integer per token that names its sequence within the row `[B, T]`.

    Returns:
        `KlPenalty`, in float32, or float64 if an input is.

    Raises:
        ConfigError: Target "token" in the reward; no coefficient; a ratio without `behavior_logprobs`; estimator "full".
        RecordError: Shapes or dtypes do not fit.
        NonFiniteLogprobError: NaN or infinity in an unmasked position; names tensor, row and position. A reference
            log-probability of -inf is an infinite KL and is refused as well.
    """
    coef = checked_coef(config, coef, behavior_logprobs)
    if config.target == "token" and config.placement != "loss":
        raise ConfigError(
            f"mismatch.kl.target='token' with placement={config.placement!r} cannot be a reward, which the host "
            "credits to earlier tokens as well; use kl_surrogate (reward_path='surrogate'), or target='sequence'."
        )
    tokens = checked_tokens(logprobs, ref_logprobs, mask, behavior_logprobs)
    estimate = estimate_from_log_ratio(tokens.logprobs - tokens.ref_logprobs, config.estimator)
    nothing = torch.zeros_like(tokens.ref_logprobs)
    # With placement "reward", the loss stays connected to the graph, so that a host can always call backward.
    loss = (
        coef * _ratio(tokens, config.ratio, sequence_ids) * estimate if config.placement != "reward" else estimate * 0
    )
    reward = coef * estimate.detach() if config.placement != "loss" else nothing
    return KlPenalty(
        loss=loss.to(tokens.dtype),
        reward=reward.to(tokens.dtype),
        metrics=_metrics(tokens, config, coef, sequence_ids),
    )


def kl_metrics(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    config: KlConfig,
    *,
    behavior_logprobs: Tensor | None = None,
    coef: float | None = None,
    sequence_ids: Tensor | None = None,
) -> dict[str, Tensor]:
    """Return the metrics of the KL term.

    With d = logprobs - ref_logprobs. Means are over unmasked tokens (0 if there is none) and unweighted, so they are under the
    policy that sampled:

    - `kl/k1`: mean d, nats per token; unbiased for KL(pi||ref) if pi sampled; may be negative.
    - `kl/k3`: mean exp(-d) - 1 + d, nats per token; also unbiased if pi sampled; never negative.
    - `kl/sequence`: mean over sequences of the sum of d, nats.
    - `kl/estimate`: mean of the configured estimate, nats per token; biased for k2 and abs.
    - `kl/saturated_frac`: share of tokens with d < -30, where k3 continues along its tangent.
    - `kl/log_ratio_max`: largest abs(d), nats.
    - `kl/coef`: the coefficient.
    - `kl/ratio_mean`, `kl/ratio_max`, `kl/ratio_saturated_frac`: mean and largest importance ratio of the configured level,
      and the share of ratios cut at exp(30); only if there is a ratio.

    Args, Raises:
        As `kl_penalty`.

    Returns:
        Detached 0-d float64 tensors by name.
    """
    coef = checked_coef(config, coef, behavior_logprobs)
    tokens = checked_tokens(logprobs, ref_logprobs, mask, behavior_logprobs)
    return _metrics(tokens, config, coef, sequence_ids)


@torch.no_grad()
def _metrics(tokens: Tokens, config: KlConfig, coef: float, sequence_ids: Tensor | None) -> dict[str, Tensor]:
    d = tokens.logprobs - tokens.ref_logprobs
    count = tokens.mask.sum().clamp(min=1)
    if sequence_ids is None:
        sequences = int(tokens.mask.any(dim=1).sum())
    else:
        sequences = Packing.of(sequence_ids, tokens.mask).count

    def mean(values: Tensor) -> Tensor:
        return torch.where(tokens.mask, values, 0.0).double().sum() / count

    found = {
        "kl/k1": mean(d),
        "kl/k3": mean(estimate_from_log_ratio(d, "k3")),
        "kl/sequence": d.sum() / max(sequences, 1),
        "kl/estimate": mean(estimate_from_log_ratio(d, config.estimator)),
        "kl/saturated_frac": mean((d < -LARGEST_EXPONENT).double()),
        "kl/log_ratio_max": d.abs().max() if d.numel() else d.sum(),
        "kl/coef": d.new_tensor(coef),
    }
    if config.ratio != "none":
        ratio = _ratio(tokens, config.ratio, sequence_ids)
        found["kl/ratio_mean"] = mean(ratio)
        found["kl/ratio_max"] = torch.where(tokens.mask, ratio, 0.0).max() if d.numel() else d.sum()
        # A ratio that was cut is exp(30), give or take the last bit.
        found["kl/ratio_saturated_frac"] = mean((ratio > math.exp(LARGEST_EXPONENT) * (1 - 1e-12)).double())
    return found


def _ratio(tokens: Tokens, level: str, sequence_ids: Tensor | None) -> Tensor:
    if level != "sequence" or sequence_ids is None:
        return tokens.ratio(level)
    packing = Packing.of(sequence_ids, tokens.mask)
    return packing.pack(packing.unpack(tokens).ratio(level))
