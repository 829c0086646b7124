"""What to change in verl where its trainer does not compute as asked for."""

from __future__ import annotations

from mismatch_ext.precision.dtypes import TrainerFixes

MIXED = "actor_rollout_ref.actor.fsdp_config.mixed_precision"
FIXES = TrainerFixes(
    masters="Set actor_rollout_ref.actor.fsdp_config.model_dtype=fp32, and let mixed_precision compute in the half dtype",
    autocast_off=f"Set {MIXED}.param_dtype=fp32, or leave it out",
    autocast=f"Set {MIXED}.param_dtype={{flag}}, or leave it out: mismatch.precision sets it.",
    flags=(("float16", "fp16"), ("bfloat16", "bf16")),
    reduction=f"Set {MIXED}.reduce_dtype=fp32",
)
