"""The header that a run in TRL writes to its metrics file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mismatch_ext.adapters.transformers.header import PACKAGES, of_arguments

from mismatch_ext.log import run_info
from mismatch_ext.names import TRL
from mismatch_ext.precision.audit import AuditReport
from mismatch_ext.precision.dtypes import TrainerFixes
from mismatch_ext.versions import installed

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
        readings: What was read back from each side, by its name.
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
