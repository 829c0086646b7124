"""What is active in this run: as a banner for a person, and as the header of the metrics stream."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mismatch_ext.banner import monitor_lines, rule_of
from mismatch_ext.config import MismatchConfig
from mismatch_ext.monitor import Monitor
from mismatch_ext.precision.audit import AuditReport
from mismatch_ext.versions import installed

REPORTED = ("mismatch-ext", "torch", "transformers", "accelerate", "trl", "vllm")


def run_header(
    trainer: Any,
    readings: Mapping[str, Any],
    patches: list[dict[str, Any]],
    audit: AuditReport | None,
) -> dict[str, Any]:
    """Return the header of a metrics stream: versions, dtypes of both sides, patches and the block.

    Args:
        trainer: The trainer, fully built.
        readings: What was read back, by side.
        patches: Descriptions of the patches in use.
        audit: The precision audit, or None when no precision was asked for.
    """
    device = trainer.accelerator.device
    header = {
        "run": {
            "name": trainer.args.run_name or str(trainer.args.output_dir),
            "host": f"trl {installed('trl')} {type(trainer).__name__}",
            "model": str(trainer.model.config._name_or_path),
            "model_type": trainer.model.config.model_type,
            "parameters": sum(p.numel() for p in trainer.model.parameters()),
            "device": f"{device.type} ({platform.processor() or platform.machine()})",
            "seed": trainer.args.seed,
        },
        "trainer": dataclasses.asdict(readings["trainer"]),
        "engine": dataclasses.asdict(readings["engine"]) if "engine" in readings else None,
        "sampling": dataclasses.asdict(trainer._sampling),
        "patches": patches,
        "config": trainer._block.to_dict(),
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
    weights = ", ".join(trainer["parameter_dtypes"])
    scaler = trainer["scaler"]
    scaler_text = f"{scaler['class']} at {scaler['scale']:g}" if scaler else "none"
    lines = [
        f"mismatch-ext {versions['mismatch-ext']} is active on {header['run']['host']}",
        f"  trainer    {weights} weights, autocast {trainer['autocast_dtype'] or 'off'}, "
        f"loss scaler {scaler_text}   [subclass]",
        f"  engine     vllm {engine['version']}, {engine['model_dtype']}, KV cache {engine['kv_cache_dtype']}, "
        f"{engine['logprobs_mode']}   [native]"
        if engine is not None
        else "  engine     none: the trainer's own model generates",
    ]
    if block.precision is None:
        lines.append("  precision  not asked for: the dtypes of both sides are the host's own choice")
    else:
        lines.append(f"  precision  uniform {block.precision.dtype}: audited on both sides")
    lines += _mitigations(block, trainer_seam="subclass", sampled_by_engine=engine is not None)
    if engine is not None:
        lines.append(f"  monitor    gap measured at every generation; weight sync check: {block.monitor.weight_sync}")
    lines += monitor_lines(monitor, run_dir)
    lines += [f"  patch      {patch['name']} on {patch['target']}" for patch in header["patches"]]
    return "\n".join(lines)


def _mitigations(block: MismatchConfig, trainer_seam: str, *, sampled_by_engine: bool) -> list[str]:
    """Return a line for each mitigation that is on."""
    lines = []
    if block.correction is not None:
        lines.append(f"  correction {block.correction.preset or 'custom'}   [{trainer_seam}]")
    if block.routing is not None:
        source = "the trainer's old-logprob pass"
        if block.routing.mode == "R3":
            source = "vllm" if sampled_by_engine else "transformers' generation"
        where = "old-logprob pass, update" if block.routing.mode == "R3" else "update"
        where += ", reference" if block.routing.reference else ""
        lines.append(f"  routing    {block.routing.mode}: recorded by {source}, replayed in {where}   [{trainer_seam}]")
    if block.lr is not None:
        lines.append(f"  lr         {rule_of(block.lr)}   [callback]")
    if block.kl is not None:
        kl = block.kl
        form = f"{kl.estimator} in {kl.placement}, target {kl.target}, ratio {kl.ratio}   [{trainer_seam}]"
        lines.append(f"  kl         {'TRL, unchanged   [native]' if kl.preset else form}")
    return lines
