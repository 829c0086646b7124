"""The header of a run's metrics stream, and by what the block reaches verl."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig

from mismatch_ext.banner import Seams
from mismatch_ext.config import MismatchConfig
from mismatch_ext.host_names import VERL
from mismatch_ext.precision.audit import AuditReport
from mismatch_ext.precision.fixes import TrainerFixes
from mismatch_ext.records import SamplingSettings
from mismatch_ext.versions import installed

REPORTED = ("mismatch-ext", "torch", "transformers", "verl", "ray")

MIXED = "actor_rollout_ref.actor.fsdp_config.mixed_precision"
FIXES = TrainerFixes(
    masters="Set actor_rollout_ref.actor.fsdp_config.model_dtype=fp32, and let mixed_precision compute in the half dtype",
    autocast_off=f"Set {MIXED}.param_dtype=fp32, or leave it out",
    autocast=f"Set {MIXED}.param_dtype={{flag}}, or leave it out: mismatch.precision sets it.",
    flags=(("float16", "fp16"), ("bfloat16", "bf16")),
    reduction=f"Set {MIXED}.reduce_dtype=fp32",
)


def run_header(
    config: DictConfig,
    block: MismatchConfig,
    readings: Mapping[str, Any],
    report: Mapping[str, Any],
    patches: list[dict[str, Any]],
    audit: AuditReport | None,
    sampling: SamplingSettings,
) -> dict[str, Any]:
    """Return the header of a metrics stream: versions, dtypes of both sides, patches and the block.

    Args:
        config: verl's configuration.
        block: The parsed block.
        readings: What was read back, by side.
        report: The first worker's.
        patches: Descriptions of the patches in use.
        audit: The precision audit, or None when no precision was asked for.
        sampling: Settings that the engine samples with.
    """
    trainer = config.trainer
    header = {
        "run": {
            "name": f"{trainer.project_name}/{trainer.experiment_name}",
            "host": f"verl {installed('verl')} PPOTrainerSync",
            "model": str(config.actor_rollout_ref.model.path),
            "parameters": sum(readings["trainer"].parameter_dtypes.values()),
            "device": str(readings["trainer"].device),
            "seed": int(config.actor_rollout_ref.rollout.seed),
        },
        "names": dataclasses.replace(VERL, next_rate=not logs_applied_rate(report)).to_dict(),
        "trainer": dataclasses.asdict(readings["trainer"]),
        "engine": dataclasses.asdict(readings["engine"]),
        "sampling": dataclasses.asdict(sampling),
        "worker": {key: report[key] for key in ("engine", "strategy", "loss", "versions", "moe") if key in report},
        "patches": patches,
        "config": block.to_dict(),
        "versions": {name: installed(name) or "not installed" for name in (*REPORTED, readings["engine"].engine)},
    }
    if audit is not None:
        header["audit"] = audit.to_dict()
    return header


def logs_applied_rate(report: Mapping[str, Any]) -> bool:
    """Return whether `actor/lr` is the rate that an update applied: stock engines log the one of the next.

    Args:
        report: A worker's own report.
    """
    steered = report.get("lr") is not None
    return steered or (report.get("strategy") != "megatron" and report.get("scaler") is not None)


def seams_of(report: Mapping[str, Any]) -> Seams:
    """Return by what the block reaches a worker, from the worker's own report."""
    megatron = report.get("strategy") == "megatron"
    return Seams(
        trainer="registered engine; verl's own replay, checked" if megatron else "registered engine",
        correction="configuration, set_loss_fn",
        lr="registered engine",
        kl="set_loss_fn",
        precision="configuration",
    )
