"""float16 where accelerate leaves it off."""

from __future__ import annotations

from accelerate import Accelerator

from mismatch_ext.config import PrecisionConfig
from mismatch_ext.precision.scaler import LossScaler


def compute_in_float16(accelerator: Accelerator, precision: PrecisionConfig) -> None:
    """Switch accelerate's autocast on, and give it a scaler for its device; accelerate does neither for float16 on a CPU."""
    accelerator.native_amp = True
    accelerator.scaler = LossScaler.of(precision, accelerator.device.type)
