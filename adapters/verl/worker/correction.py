"""The off-policy mask of the `correction` section, in the actor's loss."""

from __future__ import annotations

from typing import Any

import torch
from verl.utils.metric import AggregationType, Metric
from verl.workers.utils.padding import no_padding_2_padding, response_to_nested

from mismatch_ext.correction import correct
from mismatch_ext.errors import RecordError
from mismatch_ext.names import PREFIX
from mismatch_ext.presets import ResolvedCorrection


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
