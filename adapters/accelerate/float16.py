"""float16 where accelerate leaves it off."""

from __future__ import annotations

from accelerate import Accelerator

from mismatch_ext.config import LossScaleConfig
from mismatch_ext.precision.scaler import LossScaler


def compute_in_float16(accelerator: Accelerator, loss_scale: LossScaleConfig) -> None:
    """Switch accelerate's autocast on, and give it a scaler for its device; accelerate does neither for float16 on a CPU."""
    accelerator.native_amp = True
    accelerator.scaler = LossScaler.of(loss_scale, accelerator.device.type)
