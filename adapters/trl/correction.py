"""The `correction` section in TRL: TRL's own options where they do what is asked, and our own weights where they do not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mismatch_ext.correction import correct, correction_metrics
from mismatch_ext.drift import clip_metrics, clip_sums
from mismatch_ext.presets import ResolvedCorrection
from mismatch_ext.ranks import Ranks, together
from mismatch_ext.sums import over_ranks

# TRL's bound where the weights are our own: it never binds, so that TRL's metrics show the plain ratios.
UNBOUNDED = 1.0e30
# TRL's losses with PPO's clip; the others use the ratio in their own ways, and stop nothing.
CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")


def native_options(settings: ResolvedCorrection) -> dict[str, Any] | None:
    """Return the TRL arguments that do what the settings ask, or None when TRL has none that do."""
    if settings.mode != "decoupled" or settings.rules or settings.veto or settings.normalize or settings.compat:
        return None
    if settings.level == "none":
        if settings.centering is not None and settings.centering.only_measured:
            return {}  # the loss stays as it is, with TRL's own correction
        return {"vllm_importance_sampling_correction": False}
    if settings.level == "geometric" or settings.confidence is not None:
        return None
    how = "truncate" if settings.bound in ("truncate", "clip") else "mask"
    return {
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": f"{settings.level}_{how}",
        "vllm_importance_sampling_clip_max": settings.upper,
        "vllm_importance_sampling_clip_min": settings.lower,
    }


def own_options() -> dict[str, Any]:
    """Return the TRL arguments under which TRL computes plain ratios, for us to replace."""
    return {
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_max": UNBOUNDED,
        "vllm_importance_sampling_clip_min": None,
    }


class CorrectionTerm:
    """Computes the weights that TRL multiplies its per-token loss by."""

    def __init__(self, settings: ResolvedCorrection, ranks: Ranks) -> None:
        self.settings = replace(settings, off_policy_threshold=None)
        # What is fixed with the batch; DPPO's trust region is looked at in each loss.
        self._of_batch = self.settings
        if settings.divergence is not None:
            self._of_batch = replace(self.settings, loss="reinforce", divergence=None)
        self._ranks = ranks
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget what was counted since the last log."""
        # Tokens that a trust region or a rejection stops, and all.
        self._stopped = torch.zeros(2, dtype=torch.float64)

    @property
    def reinforces(self) -> bool:
        """Whether the policy term is A log pi with weights pi/mu, instead of TRL's clipped ratio."""
        return self.settings.weighs_score

    def apply(self, output: dict[str, Any], old_logprobs: Tensor, mask: Tensor) -> dict[str, float]:
        """Replace TRL's importance ratios in a batch of fresh completions, and return metrics over all ranks."""
        rollout, chosen = output["sampling_per_token_logps"], mask.bool()
        with together(self._ranks):
            found = correct(
                old_logprobs=old_logprobs, rollout_logprobs=rollout, response_mask=chosen, config=self._of_batch
            )
        if self.settings.mode == "bypass":
            # The ratio pi/mu is in TRL's own clipped term, or in `policy_weights`; only rejection is left to apply here.
            output["old_per_token_logps"] = torch.where(chosen, rollout, 0.0)
            multiplier = found.mask.to(torch.float32)
        else:
            multiplier = found.as_multiplier()
        output["importance_sampling_ratio"] = torch.where(chosen, multiplier, 1.0)
        return correction_metrics(over_ranks(found.sums, self._ranks))

    def policy_weights(self, logps: Tensor, inputs: Mapping[str, Any], mask: Tensor) -> Tensor:
        """Return the weights of the policy term of `loss: reinforce` or of DPPO `[B, T]`, from the current policy."""
        chosen = mask.bool()
        if not bool(chosen.any()):
            return torch.zeros_like(logps)
        found = correct(
            old_logprobs=logps,
            rollout_logprobs=inputs["sampling_per_token_logps"],
            response_mask=chosen,
            config=self.settings,
            advantages=inputs["advantages"],
        )
        if torch.is_grad_enabled():
            stopped = (chosen & ~found.mask.bool()).sum()
            self._stopped += torch.stack([stopped, chosen.sum()]).double().cpu()
        return found.as_multiplier()

    def metrics(self) -> dict[str, float]:
        """Return the share of tokens that DPPO's trust region has stopped on all ranks since the last log; all ranks call it."""
        if self.settings.divergence is None:
            return {}
        stopped, tokens = self._ranks.sum(self._stopped).tolist()
        self.begin_anew()
        return {"trust_region_frac": stopped / tokens} if tokens else {}


# Phantom clipping: updates that a clip on pi_trainer / pi_engine stops before any drift.


def clips_engine_ratio(settings: ResolvedCorrection | None, loss_type: str) -> bool:
    """Tell whether TRL's loss has PPO's clip on the ratio to the engine's log-probabilities."""
    return settings is not None and settings.mode == "bypass" and settings.loss == "ppo_clip" and loss_type in CLIPPED


def phantom(
    trainer: Any, output: Mapping[str, Any], gap: tuple[Tensor, Tensor, Tensor], clips: bool, ranks: Ranks
) -> dict[str, float]:
    """Return the measures of phantom clipping over all ranks, those that the batch has tokens for; every rank must call it."""
    trained, engine, mask = gap
    sequences = trainer.importance_sampling_level == "sequence"
    sums = clip_sums(
        trainer=trained,
        engine=engine,
        advantages=output["advantages"],
        mask=mask,
        low=trainer.epsilon_low,
        high=trainer.epsilon_high,
        sequences=sequences,
    )
    metrics = clip_metrics(over_ranks(sums, ranks))
    logged = metrics if clips else {"advantage_gap": metrics["advantage_gap"]}
    return {name: value for name, value in logged.items() if math.isfinite(value)}
