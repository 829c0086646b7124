"""Runs of the real TRL with settings of its own that were drawn."""

from __future__ import annotations

from typing import Any

from mismatch_ext.adapters.trl import MismatchGRPOConfig

from mismatch_ext.errors import ConfigError
from tests.oracle import watch_float32_error
from tests.peers.trl.scenarios_training import arguments, build, keep_names, outcome

# Sums of grouped products depend on what else the process has computed.
EAGER = {"experts_implementation": "eager"}


def given(host: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a run that saves each step; TRL's own correction is what TRL's default is, unless drawn."""
    correction = {"vllm_importance_sampling_mode": "sequence_mask"}
    saving = {"save_strategy": "steps", "save_steps": 1, "lr_scheduler_type": "constant"}
    return {"model_init_kwargs": EAGER, "router_aux_loss_coef": 0.0, **saving, **correction, **host}


def train(
    model: str, out: str, block: dict[str, Any], host: dict[str, Any], resume: str | None = None
) -> dict[str, Any]:
    """Train, from a checkpoint if there is one."""
    trainer = build(model, out, block, **given(host))
    keep_names(trainer)
    errors = watch_float32_error(trainer)
    trainer.train(resume_from_checkpoint=resume)
    return outcome(trainer, float32_errors=errors, verdict=trainer.mm.verdict.status)


def refused(out: str, draws: list[dict[str, Any]]) -> list[str]:
    """Return what the configuration says of each draw; nothing if it takes it."""
    found = []
    for draw in draws:
        try:
            MismatchGRPOConfig(**arguments(out, mismatch=draw["block"], **given(draw["host"])))
            found.append("")
        except ConfigError as error:
            found.append(str(error))
    return found
