"""What the block changes in the actor's loss: the KL term, bypass losses that verl has no words for, and the off-policy mask.

verl's `ppo_loss` runs as it is, with its own KL term switched off; what is added is aggregated by verl's `agg_loss` with the
denominators of the global batch, so that the gradient depends neither on ranks nor on micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from mismatch_ext.adapters.verl.correction import OWN_LOSS, native_rollout_correction, settings_of
from mismatch_ext.adapters.verl.kl import BASELINE, COEF, in_loss, loss_term
from mismatch_ext.adapters.verl.own_loss import needs_own_loss
from tensordict import TensorDict
from torch import Tensor
from verl.trainer.ppo.core_algos import (
    agg_loss,
    compute_policy_loss_reinforce,
    compute_policy_loss_vanilla,
    register_policy_loss,
)
from verl.utils import tensordict_utils
from verl.utils.metric import AggregationType, Metric
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding, response_to_nested

from mismatch_ext.config import KlConfig, MismatchConfig
from mismatch_ext.correction import Settings, correct
from mismatch_ext.errors import RecordError

BYPASS = ("bypass_mode", OWN_LOSS)
FIELDS = ("ref_log_prob", "loss_mask", "old_log_probs", "rollout_log_probs", BASELINE)


def make_loss(actor_config: Any, block: MismatchConfig, distillation: Any = None) -> Callable[..., Any]:
    """Return the function for `TrainingWorker.set_loss_fn`, picklable.

    Args:
        actor_config: verl's ActorConfig of this worker; its own is left alone, the loss gets a copy.
        block: The block of this run.
        distillation: verl's DistillationConfig where distillation is on.
    """
    kl = block.kl if block.kl is not None and block.kl.preset is None else None
    settings = None if block.correction is None else settings_of(block.correction)
    config = actor_config
    if kl is not None:
        # `replace` makes a new one of a configuration whose fields are frozen; the driver's copy still asks for the reference.
        config = replace(config, use_kl_loss=False, global_batch_info={})
    if settings is not None and settings.mode == "bypass" and native_rollout_correction(settings) is None:
        policy_loss = replace(config.policy_loss, loss_mode=OWN_LOSS, rollout_correction=settings)
        config = replace(config, policy_loss=policy_loss, global_batch_info={})
    base: Callable[..., Any] = partial(ppo_loss, config=config)
    if distillation is not None:
        from verl.trainer.distillation.losses import distillation_ppo_loss

        base = partial(distillation_ppo_loss, config=config, distillation_config=distillation)
    masked = settings if settings is not None and settings.off_policy_threshold is not None else None
    # Bypass may be the user's own setting of verl's, which no block has.
    if needs_own_loss(block) is None and config.policy_loss.loss_mode not in BYPASS:
        return base
    return partial(
        mismatch_loss,
        base=base,
        config=config,
        kl=kl if kl is not None and in_loss(kl) else None,
        coef=None if kl is None else kl.coef if kl.coef is not None else float(actor_config.kl_loss_coef),
        off_policy=masked,
    )


def mismatch_loss(
    model_output: Any = None,
    data: Any = None,
    dp_group: Any = None,
    *,
    base: Callable[..., Any],
    config: Any,
    kl: KlConfig | None = None,
    coef: float | None = None,
    off_policy: Settings | None = None,
    **logits: Any,
) -> Any:
    """Compute verl's loss of a micro-batch and add the block's terms.

    Args:
        model_output: `log_probs` and what else verl's engine computed, or None where it asks for a term of the logits.
        data: The micro-batch.
        dp_group: verl's data-parallel group.
        base: verl's loss.
        config: The actor's configuration that `base` runs with.
        kl: The `kl` section, where a part of it is in the loss.
        coef: Its coefficient, unless the batch carries one.
        off_policy: The `correction` section, where it has an off-policy mask.
        **logits: What verl's engine passes with the logits.

    Returns:
        Loss and metrics, as verl's.
    """
    if model_output is None:
        return base(data=data, **logits)
    extra: dict[str, Any] = {}
    given = data
    if off_policy is not None:
        given, extra = _without_drifted(model_output, data, off_policy)
    loss, metrics = _policy_part(base, config, model_output, given, dp_group)
    metrics.update(extra)
    if kl is not None:
        value = kl_loss(config, kl, model_output, data)
        found = tensordict_utils.get_non_tensor_data(data=data, key=COEF, default=None)
        used = coef if found is None else float(found)
        assert used is not None
        loss = loss + used * value
        kind = metrics["actor/pg_loss"].aggregation if "actor/pg_loss" in metrics else AggregationType.SUM
        metrics["kl_loss"], metrics["kl_coef"] = Metric(value=value, aggregation=kind), used
    return loss, metrics


def kl_loss(config: Any, kl: KlConfig, model_output: Any, data: TensorDict) -> Tensor:
    """Return the KL term of a micro-batch for coefficient 1: its share of the global batch's, a scalar."""
    logps = no_padding_2_padding(model_output["log_probs"], data)
    padded = data.select(*(name for name in FIELDS if name in data)).to_padded_tensor()
    fields = {name: padded[name] for name in padded.keys()}
    share: Tensor = agg_loss(
        loss_mat=loss_term(logps, fields, kl),
        loss_mask=fields["loss_mask"].bool(),
        loss_agg_mode=config.loss_agg_mode,
        **config.global_batch_info,
    )
    return share


def _policy_part(base: Callable[..., Any], config: Any, model_output: Any, data: Any, dp_group: Any) -> Any:
    """Return verl's loss, which in bypass mode fails for a micro-batch of padding alone."""
    if config.policy_loss.loss_mode not in BYPASS or bool(data["response_mask"].values().any()):
        return base(model_output=model_output, data=data, dp_group=dp_group)
    data = data.copy()
    data["response_mask"] = torch.ones_like(data["response_mask"])
    loss, metrics = base(model_output=model_output, data=data, dp_group=dp_group)
    # Every micro-batch must have every metric, since verl lines them up across ranks.
    nothing = {
        name: Metric(value=0.0, aggregation=value.aggregation) if isinstance(value, Metric) else value
        for name, value in metrics.items()
    }
    return loss * 0.0, nothing


def _without_drifted(model_output: Any, data: Any, settings: Settings) -> tuple[Any, dict[str, Any]]:
    """Return the micro-batch with advantage 0 for sequences that DeepSeek-V3.2's mask drops, and the share of them."""
    if "rollout_log_probs" not in data:
        raise RecordError(
            "the micro-batch has no rollout_log_probs, which mismatch.correction.off_policy_threshold needs."
        )
    logps = no_padding_2_padding(model_output["log_probs"], data).detach()
    padded = data.select("rollout_log_probs", "advantages", "response_mask").to_padded_tensor()
    mask, advantages = padded["response_mask"].bool(), padded["advantages"]
    name, dropped = "rollout_corr/off_policy_masked_fraction", 0.0
    if bool(mask.any()):
        rule = Settings(off_policy_threshold=settings.off_policy_threshold)
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
        config: The actor's configuration, with resolved settings as `policy_loss.rollout_correction`.
        rollout_is_weights: Not used: the weights are those of the current policy.
    """
    settings: Settings = config.policy_loss.rollout_correction
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
        weights = None if settings.level == "none" else found.weights
        loss, metrics = compute_policy_loss_reinforce(
            rollout_log_prob=old_log_prob, rollout_is_weights=weights, **shared
        )
    else:
        loss, metrics = compute_policy_loss_vanilla(old_log_prob=old_log_prob, rollout_is_weights=None, **shared)  # type: ignore[call-arg]
    return loss, {**metrics, **{f"rollout_corr/{name}": value for name, value in found.metrics.items()}}
