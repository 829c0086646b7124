"""Phantom clipping in TRL: what a clip on pi_trainer / pi_engine stops at the weights that sampled, and where to expect it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mismatch_ext.correction import ResolvedCorrection
from mismatch_ext.metrics.clipping import PhantomSums
from mismatch_ext.precision.dtypes import facts
from mismatch_ext.ranks import Ranks

# Of TRL's losses, those with PPO's clip; the others weigh by the ratio in ways of their own, and stop nothing.
CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")


def clips_engine_ratio(settings: ResolvedCorrection | None, loss_type: str) -> bool:
    """Tell whether TRL's loss has PPO's clip on the ratio to the engine's log-probabilities."""
    return settings is not None and settings.mode == "bypass" and settings.loss != "reinforce" and loss_type in CLIPPED


def phantom(
    trainer: Any, output: Mapping[str, Any], gap: tuple[Tensor, Tensor, Tensor], clips: bool, ranks: Ranks
) -> dict[str, float]:
    """Return the measures of phantom clipping over all ranks, without those that the batch has no tokens for.

    Every rank must call it.

    Args:
        trainer: TRL's, whose clip it is.
        output: What TRL's `_generate_and_score_completions` returned.
        gap: The trainer's and the engine's log-probabilities and the mask, `[B, T]` each.
        clips: Whether the clip is on the ratio to the engine's log-probabilities.
    """
    trained, engine, mask = gap
    sequences = trainer.importance_sampling_level == "sequence"
    found = PhantomSums.of(
        trained, engine, output["advantages"], mask, trainer.epsilon_low, trainer.epsilon_high, sequences=sequences
    )
    mine = torch.tensor(found.values(), dtype=torch.float64)
    metrics = PhantomSums(*ranks.sum(mine.to(trained.device)).tolist()).metrics()
    logged = metrics if clips else {"advantage_gap": metrics["advantage_gap"]}
    return {name: value for name, value in logged.items() if math.isfinite(value)}


def coarse_engine(trainer_dtype: str, engine_dtype: str | None, quantization: str | None) -> str | None:
    """Say why a clip on pi_trainer / pi_engine is to be expected to stop what is learnt, or return None.

    Args:
        trainer_dtype: What the trainer's matrix products are computed in.
        engine_dtype: What the engine's weights are in; None where unknown.
        quantization: The engine's, None for none.
    """
    if quantization is None and (engine_dtype is None or facts(engine_dtype).eps <= facts(trainer_dtype).eps):
        return None
    held = f"{quantization} weights" if quantization is not None else f"weights in {engine_dtype}"
    return (
        f"mismatch.correction is a clip on π_trainer/π_engine, the engine has {held} and the trainer computes in "
        f"{trainer_dtype}: updates below half a step of the engine's grid do not reach it, and the clip then stops what the "
        "trainer learns ahead "
        "(docs/stability.md). Watch mismatch/phantom_clip_frac, which should be 0; preset: decoupled_token_is clips on the "
        "trainer's own ratio."
    )
