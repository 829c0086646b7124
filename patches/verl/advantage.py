"""The two functions that verl's V1 trainer calls, by name, between rewards and advantages.

Both patches call a handler that verl's driver gives them: `KL_IN_REWARDS.calling(handler)`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from mismatch_ext.patching import Patch

Handler = Callable[[Any], dict[str, float]]
"""Gets verl's DataProto, changes it as verl's function does, and returns metrics."""

_UPSTREAM = "https://github.com/verl-project/verl/blob/v0.9.1/verl/trainer/ppo/v1/trainer_base.py"
_NOT_COVERED = (
    "verl's deprecated trainer and the asynchronous ones derived from it, which import the function for themselves."
)


def _penalise(original: Callable[..., Any], handler: Handler) -> Callable[..., Any]:
    @functools.wraps(original, updated=())
    def apply_kl_penalty(data: Any, *args: Any, **kwargs: Any) -> Any:
        return data, handler(data)

    return apply_kl_penalty


def _correct(original: Callable[..., Any], handler: Handler) -> Callable[..., Any]:
    @functools.wraps(original, updated=())
    def compute(data: Any, *args: Any, **kwargs: Any) -> Any:
        # verl's own function runs first: it measures the batch and, with the settings made here, weighs nothing.
        data, metrics = original(data, *args, **kwargs)
        return data, {**metrics, **handler(data)}

    return compute


KL_IN_REWARDS = Patch(
    name="verl/kl_in_rewards",
    peer="verl",
    supports=">=0.9.1,<=0.9.1",
    target="verl.trainer.ppo.v1.trainer_base:apply_kl_penalty",
    binding_only=True,
    make=_penalise,
    upstream=_UPSTREAM,
    reason="verl's in-reward penalty takes its own estimators alone, whose k3 is clamped, and has no registry for others.",
    not_covered=_NOT_COVERED,
    remove_when="verl has a registry of KL penalties.",
)

ROLLOUT_CORRECTION = Patch(
    name="verl/rollout_correction",
    peer="verl",
    supports=">=0.9.1,<=0.9.1",
    target="verl.trainer.ppo.v1.trainer_base:compute_rollout_correction_and_add_to_batch",
    binding_only=True,
    make=_correct,
    upstream=_UPSTREAM,
    reason="Weights that verl has no setting for, such as geometric ones or a veto, have to be set where verl sets its own.",
    not_covered=_NOT_COVERED,
    remove_when="verl takes a function for its correction.",
)
