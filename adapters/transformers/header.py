"""What a Trainer says of its run, for the header of a metrics file."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import TrainingArguments

PACKAGES = ("transformers", "accelerate", "trl", "vllm")
"""Those whose versions the header has."""


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
