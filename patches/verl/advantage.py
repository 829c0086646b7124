"""The function that verl's V1 trainer calls, by name, to penalize rewards; the driver gives it a handler."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from mismatch_ext.patching import Patch

Handler = Callable[[Any], dict[str, float]]
"""Gets verl's DataProto, changes it as verl's function does, and returns metrics."""

_UPSTREAM = "https://github.com/verl-project/verl/blob/v0.9.1/verl/trainer/ppo/v1/trainer_base.py"


def _penalize(original: Callable[..., Any], handler: Handler) -> Callable[..., Any]:
    @functools.wraps(original, updated=())
    def apply_kl_penalty(data: Any, *args: Any, **kwargs: Any) -> Any:
        return data, handler(data)

    return apply_kl_penalty


KL_IN_REWARDS = Patch(
    name="verl/kl_in_rewards",
    peer="verl",
    supports=">=0.9.1,<=0.9.1",
    target="verl.trainer.ppo.v1.trainer_base:apply_kl_penalty",
    make=_penalize,
    observed="the driver refuses a batch whose rewards it was not asked to penalize",
    upstream=_UPSTREAM,
    reason="verl's in-reward penalty takes its own estimators alone, whose k3 is clamped, and has no registry for others.",
    not_covered="verl's deprecated trainer and the asynchronous ones derived from it, which import the function for themselves.",
    remove_when="verl has a registry of KL penalties.",
)
