"""Facts about a Trainer's run, for the header of a metrics file."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import TrainingArguments

PACKAGES = ("transformers", "accelerate", "trl", "vllm")
"""The packages whose versions are in the header."""


def of_arguments(args: TrainingArguments, model: Any) -> dict[str, Any]:
    """Return facts about a run from its Trainer's arguments and model, by the names of `run_info`'s arguments."""
    config = getattr(model, "config", None)
    name = str(getattr(config, "_name_or_path", type(model).__name__))
    model_type = str(getattr(config, "model_type", ""))
    processor = platform.processor() or platform.machine()
    return {
        "name": args.run_name or str(args.output_dir),
        "model": name,
        "model_type": model_type,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "device": f"{args.device.type} ({processor})",
        "seed": args.seed,
    }
