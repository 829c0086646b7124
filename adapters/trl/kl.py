"""The `kl` section in TRL: its term in the loss, its part of the rewards, its adaptive coefficient."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mismatch_ext.config import KlConfig
from mismatch_ext.errors import ConfigError
from mismatch_ext.kl import KlController, kl_estimate, kl_full_surrogate, kl_penalty, kl_surrogate

Reduce = Callable[..., Tensor]


class KlTerm:
    """Computes what the configured KL regularisation adds to TRL's loss or takes off its rewards.

    Args:
        config: The `kl` section, without a preset.
        coef: Coefficient to start with.
    """

    __name__ = "kl"  # the reward function's name in TRL's logs

    def __init__(self, config: KlConfig, coef: float) -> None:
        self.config = config
        self._first_coef = coef
        self.controller = KlController(coef, config.controller)
        self._penalties: list[float] = []
        self._coef_of_batch: float | None = None

    def reset(self) -> None:
        """Go back to the coefficient to start with, for a training that begins anew."""
        self.controller = KlController(self._first_coef, self.config.controller)
        self._coef_of_batch = None

    @property
    def coef(self) -> float:
        """Coefficient of the present batch, in its loss as in its rewards; the controller's answer counts from the next."""
        return self.controller.coef if self._coef_of_batch is None else self._coef_of_batch

    def begin(self) -> None:
        """Start a batch with the coefficient that the controller has arrived at."""
        self._coef_of_batch = None

    @property
    def in_rewards(self) -> bool:
        """Whether a part of the KL enters TRL's rewards, before they are normalised by group."""
        return self.config.placement != "loss" and self.config.reward_path == "rewards"

    @property
    def adaptive(self) -> bool:
        """Whether the coefficient follows a target."""
        return self.config.controller is not None

    def adapt(self, old_logps: Tensor, reference_logps: Tensor, mask: Tensor, reduce: Reduce) -> None:
        """Move the coefficient by the KL of a fresh batch of completions, over all ranks."""
        found = self.measure(old_logps, reference_logps, mask, reduce)
        self._coef_of_batch = self.controller.coef
        if found["tokens"]:
            self.controller.update(found["mismatch/kl_ref_k1"])

    def loss(
        self,
        logps: Tensor,
        inputs: Mapping[str, Any],
        mask: Tensor,
        logits: Callable[[], tuple[Tensor, Tensor]],
        temperature: float = 1.0,
    ) -> Tensor:
        """Return the term `[B, T]` to be added to TRL's per-token loss, coefficient included.

        Args:
            logps: Current log-probabilities `[B, T]` with their graph.
            inputs: The micro-batch.
            mask: 1 for tokens that are trained on `[B, T]`.
            logits: Computes the policy's and the reference's logits `[B, T, V]`, for the estimator `full`.
            temperature: Divides those logits.
        """
        coef, chosen, groups = self.coef, mask.bool(), inputs["prompt_group"]
        behavior = None
        if self.config.ratio != "none":
            behavior = inputs.get("sampling_per_token_logps", inputs.get("old_per_token_logps"))
            behavior = logps.detach() if behavior is None else behavior
        if self.config.estimator == "full":
            policy, reference = logits()
            return kl_full_surrogate(
                policy,
                reference,
                logps,
                chosen,
                self.config,
                behavior_logprobs=behavior,
                coef=coef,
                groups=groups,
                temperature=temperature,
            )
        ref_logps = inputs["ref_per_token_logps"]
        if self.in_rewards:
            return kl_penalty(logps, ref_logps, chosen, self.config, behavior_logprobs=behavior, coef=coef).loss
        return kl_surrogate(logps, ref_logps, chosen, self.config, behavior_logprobs=behavior, coef=coef, groups=groups)

    def set_rewards(self, old_logps: Tensor, reference_logps: Tensor, mask: Tensor) -> None:
        """Keep the penalty of each completion, for the reward function that this object is.

        Args:
            old_logps: Log-probabilities at sampling time `[B, T]`.
            reference_logps: The reference's `[B, T]`.
            mask: 1 for tokens that are trained on `[B, T]`.
        """
        penalty = kl_penalty(old_logps, reference_logps, mask.bool(), self.config, coef=self.coef).reward
        self._penalties = (-penalty.sum(-1)).tolist()

    def __call__(self, completions: list[Any], **_: Any) -> list[float]:
        """Return minus the KL penalty of each completion: TRL calls this as one of its reward functions."""
        penalties, self._penalties = self._penalties, []
        if len(penalties) != len(completions):
            raise ConfigError(
                f"mismatch.kl.reward_path='rewards': {len(penalties)} KL penalties for {len(completions)} completions; use "
                "reward_path='surrogate' with this trainer."
            )
        return penalties

    def measure(self, logps: Tensor, reference_logps: Tensor, mask: Tensor, reduce: Reduce) -> dict[str, float]:
        """Return the mean k3 and k1 per token over all ranks, in nats.

        Args:
            logps: Log-probabilities `[B, T]`.
            reference_logps: The reference's `[B, T]`.
            mask: 1 for tokens that are trained on `[B, T]`.
            reduce: Sums a tensor over ranks.
        """
        chosen = mask.bool()
        policy, reference = logps[chosen], reference_logps[chosen]
        sums = [kl_estimate(policy, reference, name).double().sum() for name in ("k3", "k1")]
        k3, k1, count = reduce(torch.stack([*sums, chosen.sum().double()]), reduction="sum").tolist()
        return {
            "tokens": count,
            "kl": k3 / max(count, 1.0),
            "mismatch/kl_ref_k1": k1 / max(count, 1.0),
            "mismatch/kl_coef": self.coef,
        }
