"""The `correction` section in the actor's loss: bypass losses that verl cannot express, and the off-policy mask."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from mismatch_ext.adapters.verl.settings.correction import OWN_LOSS
from torch import Tensor
from verl.trainer.ppo.core_algos import (
    compute_policy_loss_reinforce,
    compute_policy_loss_vanilla,
    register_policy_loss,
)
from verl.utils.metric import AggregationType, Metric
from verl.workers.config import PolicyLossConfig
from verl.workers.utils.padding import no_padding_2_padding, response_to_nested

from mismatch_ext.correction import ResolvedCorrection, correct, of_weights
from mismatch_ext.errors import RecordError
from mismatch_ext.recorder import PREFIX


@dataclass
class OwnPolicyLoss(PolicyLossConfig):
    """verl's settings of a policy loss, with those of ours beside them."""

    correction: ResolvedCorrection = ResolvedCorrection()

    @classmethod
    def of(cls, given: PolicyLossConfig, correction: ResolvedCorrection) -> OwnPolicyLoss:
        """Return the settings of `bypass_policy_loss`.

        Args:
            given: What the user has set.
            correction: The resolved `correction` section.
        """
        theirs = {field.name: getattr(given, field.name) for field in fields(PolicyLossConfig)}
        return cls(**{**theirs, "loss_mode": OWN_LOSS}, correction=correction)


def without_drifted(model_output: Any, data: Any, settings: ResolvedCorrection) -> tuple[Any, dict[str, Any]]:
    """Return the micro-batch with advantage 0 for sequences that DeepSeek-V3.2's mask drops, and the share of them."""
    if "rollout_log_probs" not in data:
        raise RecordError(
            "the micro-batch has no rollout_log_probs, which mismatch.correction.off_policy_threshold needs."
        )
    logps = no_padding_2_padding(model_output["log_probs"], data).detach()
    padded = data.select("rollout_log_probs", "advantages", "response_mask").to_padded_tensor()
    mask, advantages = padded["response_mask"].bool(), padded["advantages"]
    name, dropped = PREFIX + "off_policy_masked_fraction", 0.0
    if bool(mask.any()):
        rule = ResolvedCorrection(off_policy_threshold=settings.off_policy_threshold)
        found = correct(padded["rollout_log_probs"], logps, mask, rule, advantages=advantages)
        dropped = found.metrics["off_policy_masked_fraction"]
        data = data.copy()
        kept = torch.where(found.mask.any(-1, keepdim=True), advantages, 0.0)
        data["advantages"] = response_to_nested(kept, data["response_mask"])
    return data, {name: Metric(value=dropped, aggregation=AggregationType.MEAN)}


@register_policy_loss(OWN_LOSS)
def bypass_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """Compute verl's clipped or REINFORCE loss with pi/mu, with weights and rejection of `mismatch_ext.correction`.

    Args:
        old_log_prob: Those of the rollout `[B, T]`, as verl has them in bypass mode.
        log_prob: Current log-probabilities `[B, T]`.
        advantages: Per token `[B, T]`.
        response_mask: Tokens that are trained on `[B, T]`.
        loss_agg_mode: verl's mode of aggregation.
        config: The actor's configuration, with an `OwnPolicyLoss`.
        rollout_is_weights: Not used: the weights are those of the current policy.
    """
    settings: ResolvedCorrection = config.policy_loss.correction
    rules = replace(settings, off_policy_threshold=None)
    found = correct(old_log_prob, log_prob.detach(), response_mask, rules)
    shared = {
        "log_prob": log_prob,
        "advantages": advantages,
        "response_mask": found.mask,
        "loss_agg_mode": loss_agg_mode,
        "config": config,
    }
    if settings.loss == "reinforce":
        loss, metrics = compute_policy_loss_reinforce(
            rollout_log_prob=old_log_prob,
            rollout_is_weights=None if settings.level == "none" else found.weights,
            **shared,
        )
    else:
        loss, metrics = compute_policy_loss_vanilla(old_log_prob=old_log_prob, rollout_is_weights=None, **shared)  # type: ignore[call-arg]
    weights = of_weights(found.metrics)
    # In bypass mode verl's driver has no old policy and cannot measure the gap: verl's bypass loss logs it under these names.
    gap = {f"rollout_corr/{name}": value for name, value in found.metrics.items() if name not in weights}
    return loss, {**metrics, **gap, **{PREFIX + name: value for name, value in weights.items()}}
