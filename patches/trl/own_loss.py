"""Let a trainer wrap TRL's own loss itself, below every subclass that builds on that loss."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from mismatch_ext.patching import Patch

SEAM = "_around_own_loss"
"""Method of a trainer that is called instead of TRL's function, with that function as its first argument."""


def _probe(original: Any) -> str | None:
    """Say why this function cannot be called with a trainer, a model and inputs, or return None."""
    try:
        inspect.signature(original).bind("self", "model", "inputs")
    except TypeError as error:
        return f"called with (self, model, inputs), {error}."
    return None


def _make(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _compute_loss(self: Any, model: Any, inputs: Any) -> Any:
        around = getattr(self, SEAM, None)
        return original(self, model, inputs) if around is None else around(original, model, inputs)

    return _compute_loss


OWN_LOSS = Patch(
    name="trl/own_loss",
    peer="trl",
    supports=">=1.13.0,<=1.16.0",
    target="trl.trainer.grpo_trainer:GRPOTrainer._compute_loss",
    make=_make,
    probe=_probe,
    observed="behavior.check_loss compares TRL's loss with known values, and each update must contain the wrapped loss",
    upstream="https://github.com/huggingface/trl/blob/v1.16.0/trl/trainer/grpo_trainer.py",
    reason=(
        "a subclass adds terms, scales and scoring passes around TRL's KL term and importance ratio; what replaces these has to "
        "stand at the same depth, and a class among a trainer's bases cannot get below the user's own."
    ),
    not_covered="A reference to the function that was taken before, and losses that do not call it: a run with those is refused.",
    remove_when="GRPOTrainer has a method of its own for the KL term and the weights of the per-token loss.",
)
