"""The `kl` section in TRL: the KL term under TRL's names of its inputs, and the reward function that subtracts the KL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mismatch_ext.errors import ConfigError
from mismatch_ext.kl import KlTerm
from mismatch_ext.kl.term import Logits


def kl_loss(
    term: KlTerm, logps: Tensor, inputs: Mapping[str, Any], mask: Tensor, logits: Logits, temperature: float
) -> Tensor:
    """Return what is added to TRL's per-token loss `[B, T]`, coefficient included.

    Args:
        term: The run's KL term.
        logps: Current log-probabilities `[B, T]` with their graph.
        inputs: The micro-batch.
        mask: 1 for tokens that are trained on `[B, T]`.
        logits: Computes the policy's and the reference's logits `[B, T, V]`, for the estimator `full`.
        temperature: Divides those logits.
    """
    return term.loss(
        logps,
        inputs["ref_per_token_logps"],
        mask,
        rollout_logprobs=inputs.get("sampling_per_token_logps"),
        old_logprobs=inputs.get("old_per_token_logps"),  # TRL leaves it out where the policy is still the old one
        groups=inputs["prompt_group"],
        logits=logits,
        temperature=temperature,
    )


class KlReward:
    """One of TRL's reward functions: minus the KL penalty of each completion."""

    __name__ = "kl"  # in TRL's logs

    def __init__(self) -> None:
        self.penalties: list[float] = []
        """KL penalties of the completions that are about to be rewarded."""

    def __call__(self, completions: list[Any], **_: Any) -> list[float]:
        """Return the rewards, once for each batch."""
        penalties, self.penalties = self.penalties, []
        if len(penalties) != len(completions):
            raise ConfigError(
                f"mismatch.kl.reward_path='rewards': {len(penalties)} KL penalties for {len(completions)} completions; use "
                "reward_path='surrogate' with this trainer."
            )
        return [-penalty for penalty in penalties]
