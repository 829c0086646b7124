"""What the block changes in the actor's loss: the KL term, and the off-policy mask.

verl's `ppo_loss` runs as it is, with its own KL term switched off; what is added is aggregated by verl's `agg_loss` with the
denominators of the global batch, so that the gradient depends neither on ranks nor on micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from mismatch_ext.adapters.verl.bad_rows import bad_rows
from mismatch_ext.adapters.verl.refusals import settings_of
from tensordict import TensorDict
from torch import Tensor
from verl.trainer.ppo.core_algos import agg_loss
from verl.utils import tensordict_utils
from verl.utils.metric import AggregationType, Metric
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding, response_to_nested

from mismatch_ext.config import KlConfig, MismatchConfig
from mismatch_ext.correction import correct
from mismatch_ext.errors import RecordError
from mismatch_ext.kl import kl_terms
from mismatch_ext.names import PREFIX
from mismatch_ext.presets import ResolvedCorrection

BYPASS = "bypass_mode"
COEF = "mismatch_kl_coef"
"""Key of the batch's `extra_info` that carries the KL's coefficient from the driver."""
WEIGHTS = "rollout_is_weights"
"""verl's field of the weights by which its driver corrects, and its policy loss multiplies each token."""
BASELINE = "mismatch_kl_baseline"
"""Field of the batch that holds the driver's baseline of each token, nats."""
FIELDS = ("ref_log_prob", "loss_mask", "old_log_probs", "rollout_log_probs", BASELINE)
"""Fields that the KL term reads from a micro-batch, if it has them."""


def needs_own_loss(block: MismatchConfig) -> str | None:
    """Return the first key of a block, without `mismatch.`, that verl's own loss cannot do; None if it can do all of them."""
    if block.kl is not None and block.kl.in_loss:
        return "kl"
    settings = None if block.correction is None else settings_of(block.correction)
    if settings is not None and settings.off_policy_threshold is not None:
        return "correction.off_policy_threshold"
    return "correction.mode='bypass'" if settings is not None and settings.mode == "bypass" else None


def weighs(block: MismatchConfig) -> bool:
    """Tell whether verl's policy loss is to be multiplied by weights that its driver has put into the batch."""
    settings = None if block.correction is None else settings_of(block.correction)
    return settings is not None and settings.mode == "decoupled" and settings.level != "none"


def module_of(loss: Any) -> str:
    """Return the module of the function that computes a loss."""
    return str(getattr(loss, "func", loss).__module__)


def check_weighed(data: Any) -> None:
    """Raise RecordError if an update's samples have no weights to multiply them: verl's loss would train on them without."""
    if WEIGHTS not in data:
        raise RecordError(
            f"mismatch.correction: this update's samples have no {WEIGHTS!r}, by which verl's loss would weigh them. Something "
            "between the driver's advantages and the update has dropped the field; pass it on with the others."
        )


def make_loss(actor_config: Any, block: MismatchConfig) -> Callable[..., Any]:
    """Return the function for `TrainingWorker.set_loss_fn`, picklable, with a copy of verl's ActorConfig."""
    kl = block.kl
    settings = None if block.correction is None else settings_of(block.correction)
    config = actor_config
    if kl is not None:
        # `replace` makes a new one of a configuration whose fields are frozen; the driver's copy still asks for the reference.
        config = replace(config, use_kl_loss=False, global_batch_info={})
    base: Callable[..., Any] = partial(ppo_loss, config=config)
    # Bypass mode may also be set by the user in verl's own configuration, without the block.
    if needs_own_loss(block) is None and config.policy_loss.loss_mode != BYPASS:
        return base
    return partial(
        mismatch_loss,
        base=base,
        config=config,
        kl=kl if kl is not None and kl.in_loss else None,
        # Each batch may carry another coefficient, which follows a target.
        coef=None if kl is None else kl.coef if kl.coef is not None else float(actor_config.kl_loss_coef),
        off_policy=None if settings is None else settings.off_policy_threshold,
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
    off_policy: float | None = None,
    **logits: Any,
) -> Any:
    """Compute verl's loss of a micro-batch, `base` with `config`, and add the block's terms; return loss and metrics, as verl's.

    verl's engine gives `logits` and no output where it asks for a term of the logits. `kl` is the section where it has a part in
    the loss, `coef` its coefficient unless the batch carries one, `off_policy` the threshold of the off-policy mask, nats.
    """
    if model_output is None:
        return base(data=data, **logits)
    given: Any = data
    masked: dict[str, Any] = {}
    if off_policy is not None:
        given, masked = without_drifted(model_output, data, off_policy)
    loss, metrics = _policy_part(base, config, model_output, given, dp_group)
    metrics.update(masked)
    if kl is not None:
        value = kl_loss(config, kl, model_output, data)
        sent = tensordict_utils.get_non_tensor_data(data=data, key=COEF, default=None)
        if sent is None and kl.target_kl is not None:
            raise RecordError(
                f"the micro-batch has no {COEF!r}, the KL coefficient that follows mismatch.kl.target_kl. The trainer `mismatch` "
                "puts it into each batch's extra_info; pass that on."
            )
        used = coef if sent is None else float(sent)
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
    if any(flags := bad_rows(data)):
        bad = torch.tensor(flags, device=logps.device)
        fields["loss_mask"] = _field(fields, "loss_mask").bool() & ~bad[:, None]
    if not _is_finite(logps, _field(fields, "loss_mask").bool()):
        return logps.sum() * math.nan
    share: Tensor = agg_loss(
        loss_mat=loss_term(logps, fields, kl),
        loss_mask=fields["loss_mask"].bool(),
        loss_agg_mode=config.loss_agg_mode,
        **config.global_batch_info,
    )
    return share


def _is_finite(logps: Tensor, mask: Tensor) -> bool:
    """Tell whether the policy's log-probabilities are finite where they count.

    If they are not, the loss is not a number, as verl's own: verl then skips the step on all ranks, and a float16 scaler halves
    its scale. An error would end this rank alone.
    """
    return bool(logps.detach()[mask].isfinite().all())


def loss_term(logps: Tensor, fields: Mapping[str, Tensor], section: KlConfig) -> Tensor:
    """Return the KL term of the actor's loss `[B, T]`, nats, for coefficient 1, from current log-probabilities and `FIELDS`.

    It covers every token that the policy sampled, also those that a rejection rule takes out of the policy term: leaving out
    responses because of what was sampled would change what is regularized. Raises RecordError if a field is missing.
    """
    return kl_terms(
        logprobs=logps,
        ref_logprobs=_field(fields, "ref_log_prob"),
        mask=_field(fields, "loss_mask").bool(),
        settings=section,
        behavior=sampled_by(fields) if section.ratio != "none" else None,
        coef=1.0,
        baseline=_field(fields, BASELINE) if section.has_baseline else None,
    ).loss


def sampled_by(fields: Mapping[str, Tensor]) -> Tensor:
    """Return log-probabilities under the policy that sampled `[B, T]`: the engine's where it reports them, else the old ones."""
    return fields["rollout_log_probs"] if "rollout_log_probs" in fields else _field(fields, "old_log_probs")


def _field(fields: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in fields:
        raise RecordError(
            f"the micro-batch has no field {name!r}, which mismatch.kl needs; it has {sorted(fields)}. It is computed by the "
            "trainer `mismatch` before the update."
        )
    return fields[name]


def without_drifted(model_output: Any, data: Any, threshold: float) -> tuple[Any, dict[str, Any]]:
    """Return the micro-batch with advantage 0 for sequences that DeepSeek-V3.2's mask drops, and the share of them."""
    if "rollout_log_probs" not in data:
        raise RecordError(
            "the micro-batch has no rollout_log_probs, which mismatch.correction.off_policy_threshold needs."
        )
    logps = no_padding_2_padding(model_output["log_probs"], data).detach()
    padded = data.select("rollout_log_probs", "advantages", "response_mask").to_padded_tensor()
    mask, advantages = padded["response_mask"].bool(), padded["advantages"]
    name, dropped = PREFIX + "off_policy_masked_fraction", 0.0
    if not _is_finite(logps, mask):
        dropped = math.nan  # which sequences the rule drops is not known
    elif bool(mask.any()):
        rule = ResolvedCorrection(off_policy_threshold=threshold)
        corrected = correct(
            old_logprobs=logps,
            rollout_logprobs=padded["rollout_log_probs"],
            response_mask=mask,
            config=rule,
            advantages=advantages,
        )
        dropped = corrected.metrics["off_policy_masked_fraction"]
        data = data.copy()
        kept = torch.where(corrected.mask.any(-1, keepdim=True), advantages, 0.0)
        data["advantages"] = response_to_nested(kept, data["response_mask"])
    return data, {name: Metric(value=dropped, aggregation=AggregationType.MEAN)}


def _policy_part(base: Callable[..., Any], config: Any, model_output: Any, data: Any, dp_group: Any) -> Any:
    """Return verl's loss; in bypass mode return 0 for a micro-batch of padding only, because verl's loss fails there."""
    if config.policy_loss.loss_mode != BYPASS or bool(data["response_mask"].values().any()):
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
