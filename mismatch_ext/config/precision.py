"""The `precision` section: one compute dtype on both sides."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from mismatch_ext.strict import Action, settle
from mismatch_ext.strict import require as _require


@dataclass(frozen=True, kw_only=True)
class LossScaleConfig:
    """Dynamic loss scaling, used when `precision.dtype` is float16 (defaults of arXiv 2510.26788's code)."""

    init_scale: float = 2.0**16
    """First loss scale; a power of two keeps scaling exact."""
    growth_interval: int = 400
    """Steps without overflow before the scale grows."""

    def __post_init__(self) -> None:
        settle(self, "mismatch.precision.loss_scale")
        section = "mismatch.precision.loss_scale"
        _require(self.init_scale >= 1, f"{section}.init_scale", self.init_scale, "a number >= 1")
        _require(self.growth_interval >= 1, f"{section}.growth_interval", self.growth_interval, "an integer >= 1")


@dataclass(frozen=True, kw_only=True)
class QuantizedConfig:
    """Parts of the engine that are quantised on purpose, each by the engine's own name of its format.

    The audit takes exactly these: another format, a part that is not named here, and one that is named but not quantised are
    errors.
    """

    weights: str | None = None
    """How linear layers and experts are stored, and what goes into them where the method quantises that too: vLLM's or SGLang's
    `quantization`, such as `fp8_per_channel` or `compressed-tensors`. None is not at all."""
    kv_cache: str | None = None
    """Dtype of keys and values: `kv_cache_dtype`, such as `fp8_e4m3`. None is the compute dtype."""

    def __post_init__(self) -> None:
        settle(self, "mismatch.precision.quantized")
        for name in ("weights", "kv_cache"):
            value = getattr(self, name)
            ok = value is None or (bool(value.strip()) and value.lower() not in ("auto", "none"))
            _require(ok, f"mismatch.precision.quantized.{name}", value, "the engine's name of a format, or nothing")


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """One compute dtype for trainer, weight sync and rollout engine (uniform FP16, arXiv 2510.26788)."""

    dtype: Literal["float16", "bfloat16", "float32"]
    """Compute dtype of both sides. Master weights of the trainer stay float32."""
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    """Loss scaler settings; only read when `dtype` is float16."""
    quantized: QuantizedConfig = field(default_factory=QuantizedConfig)
    """Parts of the engine that are quantised on purpose; all else computes in `dtype`."""
    readiness: Action = "error"
    """What to do when the checkpoint's weights do not fit the dtype."""

    def __post_init__(self) -> None:
        settle(self, "mismatch.precision")
