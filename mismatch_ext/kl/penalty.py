"""The KL term as a loss, as a reward, or as both, for a host that aggregates losses and credits rewards itself.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mismatch_ext.config import KlConfig
from mismatch_ext.errors import ConfigError
from mismatch_ext.kl.estimators import estimate_from_log_ratio
from mismatch_ext.kl.inputs import checked_coef, checked_tokens


@dataclass(frozen=True, kw_only=True, eq=False)
class KlPenalty:
    """A KL penalty, split into the part for the loss and the part for the rewards.

    Args:
        loss: The host adds it to the per-token loss before its own aggregation `[B, T]`, differentiable.
        reward: The host subtracts it from the token rewards `[B, T]`, detached.
    """

    loss: Tensor
    reward: Tensor


def kl_penalty(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    config: KlConfig,
    *,
    behavior_logprobs: Tensor | None = None,
    coef: float | None = None,
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
    loss = coef * tokens.ratio(config.ratio) * estimate if config.placement != "reward" else estimate * 0
    reward = coef * estimate.detach() if config.placement != "loss" else nothing
    return KlPenalty(loss=loss.to(tokens.dtype), reward=reward.to(tokens.dtype))
