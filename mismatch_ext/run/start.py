"""Checks of the block and of both sides before the first step of your own loop, and the warnings and header of its run."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

from mismatch_ext.banner import Integration
from mismatch_ext.checkpoint import STATE_FILE, read_state
from mismatch_ext.config import MismatchConfig, PrecisionConfig
from mismatch_ext.errors import ConfigError, RecordError
from mismatch_ext.patching import active_patches
from mismatch_ext.precision.audit import AuditReport, SyncReading, audit
from mismatch_ext.precision.policy import PrecisionPolicy
from mismatch_ext.precision.readiness import check_readiness
from mismatch_ext.precision.scaler import LossScaler
from mismatch_ext.run.info import run_info
from mismatch_ext.run.loop import Loop
from mismatch_ext.run.sides import LoopTrainer

HOST = "a loop of one's own"
INTEGRATION = Integration(trainer="Run", correction="run.correct", lr="run.step", kl="run.kl", precision="Run")
PACKAGES = ("transformers", "vllm", "sglang")


def check_block(block: MismatchConfig) -> None:
    """Refuse a block that asks for something that your own loop cannot have.

    Raises:
        ConfigError: Names the setting, and what is allowed.
    """
    if block.monitor.doctor is not None:
        raise ConfigError(
            f"mismatch.monitor.doctor={block.monitor.doctor!r}: a loop of one's own is not asked for its model's class and "
            "configuration; allowed: none. Write its rollouts with mismatch_ext.rollouts.write_rollouts, and give them to "
            "`mismatch-ext doctor --rollouts`."
        )
    if block.sampling_mask is not None:
        raise ConfigError(
            "mismatch.sampling_mask in a loop of one's own, which scores its batches itself: it takes log-probabilities over the "
            "masks with mismatch_ext.sampling_mask.support_logprobs (docs/sampling-mask.md); remove the section."
        )
    if block.kl is not None and block.kl.coef is None:
        raise ConfigError(
            "mismatch.kl.coef is not given, and a loop of one's own has no coefficient of a host; set it."
        )


def set_precision(precision: PrecisionConfig, trainer: LoopTrainer) -> None:
    """Let the trainer compute in the dtype that was asked for; float16 gets a loss scaler."""
    policy = PrecisionPolicy.of(precision)
    scaler = LossScaler.of(precision.loss_scale, trainer.device.type) if policy.needs_scaler else None
    trainer.compute_in(policy.dtype, scaler)


def audited(loop: Loop, sync: SyncReading | None = None) -> AuditReport | None:
    """Compare the precision that both sides compute in with the block's; return None without a `precision` section.

    Raises:
        PrecisionAuditError: They differ; the message names each difference, and what to change.
    """
    precision = loop.block.precision
    if precision is None:
        return None
    report = audit(PrecisionPolicy.of(precision), loop.trainer.reading(), loop.rollout.reading(), sync)
    report.raise_for_findings()
    return report


def check_sides(loop: Loop, dtype: str) -> tuple[AuditReport | None, str | None]:
    """Check that both sides compute as the block asks, and that the weights fit the dtype that it asks for.

    Args:
        loop: The loop.
        dtype: Dtype of the results of the trainer's matrix products.

    Returns:
        The precision audit (None if none was asked for), and a warning about the weights (None if there is nothing to warn of).
    """
    report = warning = None
    with loop.verdicts.checking("engine"):
        loop.rollout.check(loop.block, dtype)
    with loop.verdicts.checking("precision"):
        report = audited(loop)
    with loop.verdicts.checking("readiness"):
        warning = check_readiness(loop.trainer.named_parameters(), loop.block.precision)
    return report, warning


def saved_state(folder: Path) -> dict[str, Any]:
    """Return the state in a folder that `run.save` wrote to.

    Raises:
        RecordError: The folder holds no state, or a damaged one.
    """
    path = folder / STATE_FILE
    state = read_state(path)
    if state is None or not isinstance((state.get("run") or {}).get("step"), int):
        raise RecordError(f"{path} holds no state of a run; resume from a folder that run.save wrote to.")
    return state


def to_warn_of(loop: Loop, fits: str | None) -> list[tuple[str, str]]:
    """Return the names and messages of the warnings that a run begins with; all ranks must call this.

    Args:
        loop: The loop; its trainer runs its model here.
        fits: The warning about the weights; None if they fit.
    """
    rollout, surplus = loop.rollout, loop.trainer.surplus()
    bias = rollout.sampling.ratio_bias(renormalised=rollout.reading().renormalises)
    found = {"readiness": fits, "vocabulary": None if surplus is None else str(surplus), "ratio_bias": bias}
    return [(name, message) for name, message in found.items() if message is not None]


def info_of(loop: Loop, name: str, report: AuditReport | None) -> dict[str, Any]:
    """Return the header of a run's metrics, with its name and the precision audit."""
    block, trainer, rollout = loop.block, loop.trainer, loop.rollout
    device = trainer.device.type
    return run_info(
        block,
        loop.names,
        name=name,
        host=HOST,
        model=trainer.name,
        model_type=trainer.family,
        parameters=sum(p.numel() for _, p in trainer.named_parameters()),
        device=f"{device} ({platform.processor() or platform.machine()})",
        seed=loop.seed,
        trainer=trainer.reading(),
        engine=rollout.reading(),
        sampling=rollout.sampling,
        patches=list({patch["name"]: patch for patch in (*rollout.patches, *active_patches())}.values()),
        audit=report,
        packages=PACKAGES,
    )
