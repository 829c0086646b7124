"""What a run in TRL says of itself: the header of its metrics file, and how the parts of the block enter TRL."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mismatch_ext.banner import Integration
from mismatch_ext.host_names import TRL
from mismatch_ext.precision.audit import AuditReport
from mismatch_ext.precision.fixes import TrainerFixes
from mismatch_ext.run.info import run_info
from mismatch_ext.versions import installed

if TYPE_CHECKING:
    from transformers import TrainingArguments

PACKAGES = ("transformers", "accelerate", "trl", "vllm")

INTEGRATION = Integration(
    trainer="subclass", correction="subclass", lr="callback", kl="patch", sampler="transformers' generation"
)

FIXES = TrainerFixes(
    autocast_off="Turn mixed precision off (fp16=False, bf16=False)",
    autocast="Set {flag} and no other half dtype in the trainer's arguments; see that no wrapper ends autocast.",
    float16_on_cpu="accelerate ignores fp16=True on a CPU without saying so; use mismatch-ext's trainer, which turns autocast "
    "on, or set accelerator.native_amp=True and a LossScaler('cpu') yourself.",
    flags=(("float16", "fp16=True"), ("bfloat16", "bf16=True")),
)


def info_of(
    trainer: Any,
    readings: Mapping[str, Any],
    patches: list[dict[str, Any]],
    audit: AuditReport | None,
) -> dict[str, Any]:
    """Return the header of the metrics file of a trainer's run.

    Args:
        trainer: The trainer, fully built.
        readings: What was read back, by side.
        patches: Descriptions of the patches in use.
        audit: The precision audit, or None when no precision was asked for.
    """
    return run_info(
        trainer._block,
        TRL,
        host=f"trl {installed('trl')} {type(trainer).__name__}",
        **of_arguments(trainer.args, trainer.model),
        trainer=readings["trainer"],
        engine=readings.get("engine"),
        sampling=trainer._sampling,
        patches=patches,
        audit=audit,
        packages=PACKAGES,
    )


def of_arguments(args: TrainingArguments, model: Any) -> dict[str, Any]:
    """Return what a Trainer's arguments and model say of its run, by the names of `run_info`."""
    config = getattr(model, "config", None)
    return {
        "name": args.run_name or str(args.output_dir),
        "model": str(getattr(config, "_name_or_path", type(model).__name__)),
        "model_type": str(getattr(config, "model_type", "")),
        "parameters": sum(p.numel() for p in model.parameters()),
        "device": f"{args.device.type} ({platform.processor() or platform.machine()})",
        "seed": args.seed,
    }
