"""The modes of verl's V1 trainer: which of them a block runs in, by which name, and what is refused in one of them."""

from __future__ import annotations

from mismatch_ext.adapters.verl.block import RunMode
from omegaconf import DictConfig, OmegaConf

SYNC, COLOCATE, SEPARATE = "sync", "colocate_async", "separate_async"
MODES = (SYNC, COLOCATE, SEPARATE)
"""Modes of verl 0.9.1's V1 trainer, all of them."""

TRAINER = "mismatch"
"""Name of our synchronous trainer in verl's registry, prefix of the other modes' names, and the vendor's name of our engine."""

HYBRID = "actor_rollout_ref.hybrid_engine"


def trainer_of(mode: str) -> str:
    """Return the name in verl's registry of our trainer for a mode."""
    return TRAINER if mode == SYNC else f"{TRAINER}_{mode}"


def run_mode(config: DictConfig) -> RunMode:
    """Return the mode that a configuration asks for, before or after our trainer has replaced verl's."""
    given = str(OmegaConf.select(config, "trainer.v1.trainer_mode"))
    mode = next((mode for mode in MODES if given in (mode, trainer_of(mode))), given)
    updates = OmegaConf.select(config, f"trainer.v1.{mode}.parameter_sync_step") or 1
    return RunMode(name=mode, updates=int(updates))


def unsupported(config: DictConfig) -> tuple[str, object, str, str] | None:
    """Return the first setting that this package does not run with in the mode that a configuration asks for.

    Args:
        config: verl's configuration, as it was given.

    Returns:
        The setting, its value, what is allowed, and why; None where there is none.
    """
    mode = run_mode(config).name
    separate = mode == SEPARATE
    hybrid = OmegaConf.select(config, HYBRID)
    if hybrid is not None and bool(hybrid) == separate:
        if separate:
            why = (
                "servers on the trainer's devices, which sleep between validations, would be checked as if they sampled"
            )
            return HYBRID, hybrid, "False with trainer_mode='separate_async'", why
        why = "the rollout server is checked through the actor's workers"
        return HYBRID, hybrid, f"True with trainer_mode={mode!r}", why
    if mode == SYNC:
        return None
    for setting, allowed in (
        ("actor_rollout_ref.actor.strategy", ("fsdp", "fsdp2")),
        ("actor_rollout_ref.rollout.name", ("vllm",)),
    ):
        value = OmegaConf.select(config, setting)
        if value not in allowed:
            why = f"with trainer_mode={mode!r} this release was run with {' and '.join(allowed)} alone"
            return setting, value, " or ".join(map(repr, allowed)), why
    return None
