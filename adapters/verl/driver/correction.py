"""Weights and rejection over the driver's batch, where verl has no setting for what the `correction` section asks."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import replace
from typing import Any

from mismatch_ext.correction import ResolvedCorrection, correct, of_weights
from mismatch_ext.errors import RecordError
from mismatch_ext.recorder import PREFIX


def apply_correction(data: Any, settings: ResolvedCorrection) -> dict[str, float]:
    """Weigh and reject, instead of verl's `compute_rollout_correction_and_add_to_batch`.

    Args:
        data: verl's DataProto with `old_log_probs`, `rollout_log_probs` and `response_mask`; `response_mask` is replaced, as verl
            does, and `rollout_is_weights` set where there are weights.
        settings: The resolved `correction` section, of mode `decoupled`.

    Returns:
        Metrics of the weights; verl's own function has measured the gap.

    Raises:
        RecordError: The rollout's log-probabilities are missing, or nothing is unmasked.
        NonFiniteLogprobError: One of an unmasked token is NaN or infinite; names row and position.
    """
    batch = data.batch
    if "rollout_log_probs" not in batch:
        raise RecordError(
            "the batch has no rollout_log_probs, which mismatch.correction needs; set "
            "actor_rollout_ref.rollout.calculate_log_probs=True."
        )
    mask = batch["response_mask"]
    found = correct(
        batch["rollout_log_probs"], batch["old_log_probs"], mask, replace(settings, off_policy_threshold=None)
    )
    batch["response_mask"] = found.mask.to(mask.dtype)
    if settings.level != "none":
        batch["rollout_is_weights"] = found.weights
    return {PREFIX + name: value for name, value in of_weights(found.metrics).items()}


def under_our_names(metrics: MutableMapping[str, Any]) -> None:
    """Take verl's `actor/` off metrics that the workers' loss has given our prefix.

    Args:
        metrics: Those of a step; changed in place.
    """
    for name in [name for name in metrics if name.startswith(f"actor/{PREFIX}")]:
        metrics[name.removeprefix("actor/")] = metrics.pop(name)
