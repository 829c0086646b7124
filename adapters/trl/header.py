"""The header of a run's metrics stream, and how the parts of the block enter TRL."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Mapping
from typing import Any

from mismatch_ext.banner import Integration
from mismatch_ext.host_names import TRL
from mismatch_ext.precision.audit import AuditReport
from mismatch_ext.precision.fixes import TrainerFixes
from mismatch_ext.versions import installed

REPORTED = ("mismatch-ext", "torch", "transformers", "accelerate", "trl", "vllm")

SEAMS = Integration(
    trainer="subclass", correction="subclass", lr="callback", kl="patch", sampler="transformers' generation"
)

FIXES = TrainerFixes(
    autocast_off="Turn mixed precision off (fp16=False, bf16=False)",
    autocast="Set {flag} and no other half dtype in the trainer's arguments; see that no wrapper ends autocast.",
    float16_on_cpu="accelerate ignores fp16=True on a CPU without saying so; use mismatch-ext's trainer, which turns autocast "
    "on, or set accelerator.native_amp=True and a LossScaler('cpu') yourself.",
    flags=(("float16", "fp16=True"), ("bfloat16", "bf16=True")),
)


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
        "names": TRL.to_dict(),
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
