"""Steps whose gradients are not finite: what skips them, and how a loss scale stays where it is if it has no part in that."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from mismatch_ext.adapters.accelerate.deepspeed import engine_of

DEEPSPEED_FACTOR = 2.0
"""What DeepSpeed divides its loss scale by at an overflow; it has no setting for it."""


def skips_overflows(accelerator: Accelerator) -> bool:
    """Tell whether something skips a step whose gradients are not finite: accelerate's scaler, or DeepSpeed's in float16."""
    engine = engine_of(accelerator)
    if engine is not None:
        return bool(engine.fp16_enabled())
    return accelerator.scaler is not None and accelerator.scaler.is_enabled()


class HeldScale:
    """Keeps a loss scale as it is at overflows, as long as it is held."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._factor = None if accelerator.scaler is None else accelerator.scaler.get_backoff_factor()

    def hold(self, held: bool) -> None:
        """Hold the scale, or let it fall at overflows again."""
        engine = engine_of(self._accelerator)
        if engine is not None:
            scaler: Any = getattr(engine.optimizer, "loss_scaler", None)
            if hasattr(scaler, "scale_factor"):  # otherwise the scale is static
                scaler.scale_factor = 1.0 if held else DEEPSPEED_FACTOR
        elif self._factor is not None:
            self._accelerator.scaler.set_backoff_factor(1.0 if held else self._factor)
