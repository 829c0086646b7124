"""The `correction` section in TRL: TRL's own options where they do what is asked, weights in their place where they do not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mismatch_ext.correction import Settings, correct

# TRL's own bound where the weights are ours: it binds nothing, so that TRL's metrics show the plain ratios.
UNBOUNDED = 1.0e30
# What is logged of a correction, beside the gap that is measured anyway: the same on every rank.
METRICS = (
    "rollout_is_mean", "rollout_is_max", "rollout_is_min", "rollout_is_std", "rollout_is_eff_sample_size",
    "rollout_is_ratio_fraction_high", "rollout_is_ratio_fraction_low", "rollout_is_oob_ratio", "rollout_is_batch_norm_factor",
    "rollout_is_veto_fraction", "rollout_rs_masked_fraction", "rollout_rs_seq_masked_fraction",
)  # fmt: skip

# Fractions of sequences; the others are of tokens. The second pair, where weights are of whole sequences.
BY_SEQUENCE = ("rollout_is_veto_fraction", "rollout_rs_seq_masked_fraction")
BY_LEVEL = ("rollout_is_ratio_fraction_high", "rollout_is_ratio_fraction_low")


def native_options(settings: Settings) -> dict[str, Any] | None:
    """Return the TRL arguments that do what the settings ask, or None when TRL has none that do.

    Args:
        settings: The resolved `correction` section.
    """
    if settings.mode != "decoupled" or settings.rules or settings.veto or settings.normalize or settings.compat:
        return None
    if settings.level == "none":
        return {"vllm_importance_sampling_correction": False}
    if settings.level == "geometric":
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
    """Computes the weights that TRL multiplies its per-token loss by.

    Args:
        settings: The resolved `correction` section; its off-policy mask is TRL's own.
        gather: Collects a tensor from all ranks.
    """

    def __init__(self, settings: Settings, gather: Callable[[Tensor], Tensor]) -> None:
        self.settings = replace(settings, off_policy_threshold=None)
        self._gather = gather

    @property
    def reinforces(self) -> bool:
        """Whether the policy term is A log pi with weights pi/mu, in the place of TRL's clipped ratio."""
        return self.settings.mode == "bypass" and self.settings.loss == "reinforce"

    def apply(self, output: dict[str, Any], old_logprobs: Tensor, mask: Tensor) -> dict[str, float]:
        """Replace TRL's importance ratios in a batch of fresh completions, and return metrics over all ranks.

        Args:
            output: What TRL's `_generate_and_score_completions` returned; changed in place.
            old_logprobs: The trainer's log-probabilities at sampling time `[B, T]`.
            mask: 1 for tokens that are trained on `[B, T]`.
        """
        rollout, chosen = output["sampling_per_token_logps"], mask.bool()
        if not bool(chosen.any()):
            # Other ranks may have tokens, and wait for this one's metrics.
            return self.over_ranks({}, chosen)
        found = correct(rollout, old_logprobs, chosen, self.settings)
        if self.settings.mode == "bypass":
            # The ratio pi/mu is in TRL's own clipped term, or in `policy_weights`; only rejection is left to apply here.
            output["old_per_token_logps"] = torch.where(chosen, rollout, 0.0)
            multiplier = found.mask.to(torch.float32)
        else:
            multiplier = found.as_multiplier()
        output["importance_sampling_ratio"] = torch.where(chosen, multiplier, 1.0)
        return self.over_ranks(found.metrics, chosen)

    def policy_weights(self, logps: Tensor, inputs: Mapping[str, Any], mask: Tensor) -> Tensor:
        """Return the weights of the policy term of `loss: reinforce` `[B, T]`, from the current policy.

        Args:
            logps: Current log-probabilities `[B, T]`, detached.
            inputs: The micro-batch.
            mask: 1 for tokens that are trained on `[B, T]`.
        """
        chosen = mask.bool()
        if not bool(chosen.any()):
            return torch.zeros_like(logps)
        return correct(inputs["sampling_per_token_logps"], logps, chosen, self.settings).as_multiplier()

    def over_ranks(self, metrics: Mapping[str, float], chosen: Tensor) -> dict[str, float]:
        """Return the metrics over all ranks' tokens, in one collective call that every rank takes part in."""
        nan = float("nan")
        sizes = [float(chosen.sum()), float(chosen.any(-1).sum())]
        mine = torch.tensor([*sizes, *(metrics.get(name, nan) for name in METRICS)], dtype=torch.float64)
        ranks = self._gather(mine.to(chosen.device, torch.float32)[None]).double().cpu()
        tokens, sequences = ranks[:, 0], ranks[:, 1]
        columns = dict(zip(METRICS, ranks[:, 2:].T, strict=True))
        merged = {}
        for name, values in columns.items():
            known = ~values.isnan()
            if not bool(known.any()):
                continue
            if name.endswith("_max") or name.endswith("_min"):
                merged[name] = float(values[known].max() if name.endswith("_max") else values[known].min())
            else:
                weight = (sequences if self._by_sequence(name) else tokens)[known]
                merged[name] = float((values[known] * weight).sum() / weight.sum())
        if "rollout_is_std" in merged:
            # From the second moment over all tokens: spreads and sample sizes of ranks do not average.
            known, mean = ~columns["rollout_is_std"].isnan(), merged["rollout_is_mean"]
            moments = (columns["rollout_is_std"].square() + columns["rollout_is_mean"].square())[known]
            squares = float((moments * tokens[known]).sum() / tokens[known].sum())
            merged["rollout_is_std"] = max(squares - mean * mean, 0.0) ** 0.5
            merged["rollout_is_eff_sample_size"] = mean * mean / squares if squares > 0 else 0.0
        return merged

    def _by_sequence(self, name: str) -> bool:
        return name in BY_SEQUENCE or (name in BY_LEVEL and self.settings.level != "token")
