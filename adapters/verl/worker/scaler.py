"""Loss scaling of verl's FSDP engine under `precision.dtype: float16`.

verl makes a `ShardedGradScaler` with settings of its own. On a machine without CUDA it disables itself, with a warning, and
float16 is trained unscaled. The `LossScaler` that replaces it is for the engine's real device, and is never disabled.
"""

from __future__ import annotations

from typing import Any

from mismatch_ext.config import PrecisionConfig
from mismatch_ext.errors import ConfigError, PrecisionError
from mismatch_ext.precision.scaler import LossScaler


def check_precision(precision: PrecisionConfig, autocast: str, role: str) -> None:
    """Check that an engine computes in the dtype that the block asks for.

    Args:
        precision: The `precision` section.
        autocast: Name of the engine's compute dtype, for example "float16".
        role: "actor" or "ref".

    Raises:
        ConfigError: It computes in another.
    """
    if autocast != precision.dtype:
        raise ConfigError(
            f"mismatch.precision.dtype={precision.dtype!r}, but verl's {role} engine computes in {autocast}; remove "
            f"actor_rollout_ref.{role}.fsdp_config.mixed_precision, or set its param_dtype to {precision.dtype!r}."
        )


def scaler_report(scaler: Any) -> dict[str, Any] | None:
    """Return what a scaler is; None where there is none."""
    if scaler is None:
        return None
    return {"kind": type(scaler).__name__, "enabled": scaler.is_enabled(), "scale": float(scaler.get_scale())}


def scaler_metrics(scaler: Any) -> dict[str, float]:
    """Return the scale and the overflow counts, under the names that the metrics stream uses."""
    if scaler is None:
        return {}
    return scaler.metrics() if isinstance(scaler, LossScaler) else {"loss_scale": float(scaler.get_scale())}


def refuse_disabled(scaler: Any, device: str) -> None:
    """Refuse a scaler of verl's own that has disabled itself.

    Raises:
        PrecisionError: It has.
    """
    if scaler is not None and not scaler.is_enabled():
        raise PrecisionError(
            f"verl's {type(scaler).__name__} has disabled itself on device {device!r}: float16 gradients would be unscaled. Set "
            "mismatch.precision.dtype='float16', which makes one for this device, or train in bfloat16 or float32."
        )
