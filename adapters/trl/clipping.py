"""Phantom clipping in TRL: the updates that a clip on pi_trainer / pi_engine stops before any drift, and when to expect that."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mismatch_ext.drift import clip_metrics, clip_sums
from mismatch_ext.precision.dtypes import limits
from mismatch_ext.presets import ResolvedCorrection
from mismatch_ext.ranks import Ranks
from mismatch_ext.sums import over_ranks

# TRL's losses with PPO's clip; the others use the ratio in their own ways, and stop nothing.
CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")


def clips_engine_ratio(settings: ResolvedCorrection | None, loss_type: str) -> bool:
    """Tell whether TRL's loss has PPO's clip on the ratio to the engine's log-probabilities."""
    return settings is not None and settings.mode == "bypass" and settings.loss != "reinforce" and loss_type in CLIPPED


def phantom(
    trainer: Any, output: Mapping[str, Any], gap: tuple[Tensor, Tensor, Tensor], clips: bool, ranks: Ranks
) -> dict[str, float]:
    """Return the measures of phantom clipping over all ranks; a measure is left out if the batch has no tokens for it.

    Every rank must call it.
    """
    trained, engine, mask = gap
    sequences = trainer.importance_sampling_level == "sequence"
    bounds = (trainer.epsilon_low, trainer.epsilon_high)
    sums = clip_sums(trained, engine, output["advantages"], mask, *bounds, sequences=sequences)
    metrics = clip_metrics(over_ranks(sums, ranks))
    logged = metrics if clips else {"advantage_gap": metrics["advantage_gap"]}
    return {name: value for name, value in logged.items() if math.isfinite(value)}


def coarse_engine(trainer_dtype: str, engine_dtype: str | None, quantization: str | None) -> str | None:
    """Say why a clip on pi_trainer / pi_engine will probably stop learning; return None if it will not."""
    if quantization is None and (engine_dtype is None or limits(engine_dtype).eps <= limits(trainer_dtype).eps):
        return None
    held = f"{quantization} weights" if quantization is not None else f"weights in {engine_dtype}"
    return (
        f"mismatch.correction is a clip on π_trainer/π_engine, the engine has {held} and the trainer computes in "
        f"{trainer_dtype}: updates below half a step of the engine's grid do not reach it, and the clip then stops what the "
        "trainer learns ahead "
        "(docs/stability.md). Watch mismatch/phantom_clip_frac, which should be 0; preset: decoupled_token_is clips on the "
        "trainer's own ratio."
    )
