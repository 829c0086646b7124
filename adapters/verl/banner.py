"""What is active in this run of verl: as a banner for a person, and as the header of the metrics stream."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from mismatch_ext.banner import monitor_lines, rule_of
from mismatch_ext.config import MismatchConfig
from mismatch_ext.monitor import Monitor
from mismatch_ext.precision.audit import AuditReport
from mismatch_ext.records import SamplingSettings
from mismatch_ext.versions import installed

REPORTED = ("mismatch-ext", "torch", "transformers", "verl", "vllm", "ray")


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
        "trainer": dataclasses.asdict(readings["trainer"]),
        "engine": dataclasses.asdict(readings["engine"]),
        "sampling": dataclasses.asdict(sampling),
        "worker": {key: report[key] for key in ("engine", "strategy", "loss", "versions", "moe") if key in report},
        "patches": patches,
        "config": block.to_dict(),
        "versions": {name: installed(name) or "not installed" for name in REPORTED},
    }
    if audit is not None:
        header["audit"] = audit.to_dict()
    return header


def banner(block: MismatchConfig, header: Mapping[str, Any], monitor: Monitor, run_dir: Path) -> str:
    """Return the lines that say what is active, in which peer, and by which seam.

    Args:
        block: The parsed `mismatch:` block.
        header: The header of the run.
        monitor: The alarms.
        run_dir: Folder of the metrics.
    """
    trainer, engine, versions = header["trainer"], header["engine"], header["versions"]
    scaler, seam = trainer["scaler"], "registered engine"
    if header["worker"].get("strategy") == "megatron":
        seam = "verl's Megatron engine, checked"
    scaler_text = f"{scaler['class']} at {scaler['scale']:g}" if scaler else "none"
    lines = [
        f"mismatch-ext {versions['mismatch-ext']} is active on {header['run']['host']}",
        f"  trainer    {', '.join(trainer['parameter_dtypes'])} weights, autocast {trainer['autocast_dtype'] or 'off'}, "
        f"loss scaler {scaler_text}   [{seam}]",
        f"  engine     vllm {engine['version']}, {engine['model_dtype']}, KV cache {engine['kv_cache_dtype']}, "
        f"{engine['logprobs_mode']}   [native]",
    ]
    if block.precision is None:
        lines.append("  precision  not asked for: the dtypes of both sides are verl's own choice")
    else:
        lines.append(f"  precision  uniform {block.precision.dtype}: audited on both sides   [configuration]")
    if block.routing is not None:
        source = "vllm" if block.routing.mode == "R3" else "the trainer's old-logprob pass"
        where = ("old-logprob pass, update" if block.routing.mode == "R3" else "update") + (
            ", reference" if block.routing.reference else ""
        )
        lines.append(f"  routing    {block.routing.mode}: recorded by {source}, replayed in {where}   [{seam}]")
    if block.lr is not None:
        lines.append(f"  lr         {rule_of(block.lr)}   [registered engine]")
    if block.kl is not None:
        kl = block.kl
        lines.append(
            f"  kl         {kl.estimator} in {kl.placement}, target {kl.target}, ratio {kl.ratio}   [set_loss_fn]"
        )
    if block.correction is not None:
        lines.append(f"  correction {block.correction.preset or 'custom'}   [configuration, set_loss_fn]")
    lines.append(f"  monitor    gap measured at every step; weight sync check: {block.monitor.weight_sync}")
    lines += monitor_lines(monitor, run_dir)
    lines += [f"  patch      {patch['name']} on {patch['target']}" for patch in header["patches"]]
    return "\n".join(lines)
