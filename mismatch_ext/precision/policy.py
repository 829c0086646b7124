"""The dtypes that trainer, weight update and engine must have for one uniform precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mismatch_ext.precision.dtypes import canonical

if TYPE_CHECKING:
    from mismatch_ext.config import PrecisionConfig

_SHORT = {"fp8": "fp8_e4m3"}


@dataclass(frozen=True)
class PrecisionPolicy:
    """The dtypes that each side must show when both compute in one dtype (arXiv 2510.26788, for float16).

    Args:
        dtype: Compute dtype of both sides, by any name that `canonical` knows.
        quantization: Method by which the engine's weights are quantised on purpose; None if they are not.
        kv_cache: Format of the engine's KV cache, if it is another one on purpose; otherwise None.

    Raises:
        PrecisionError: The name is no compute dtype.
    """

    dtype: str
    quantization: str | None = None
    kv_cache: str | None = None

    @classmethod
    def of(cls, precision: PrecisionConfig) -> PrecisionPolicy:
        """Return the policy that the `precision` section asks for."""
        return cls(precision.dtype, precision.engine_weights, precision.engine_kv_cache)

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", canonical(self.dtype))

    @property
    def master_dtype(self) -> str:
        """Dtype of the trainable parameters: float32, because a half dtype would round small updates away."""
        return "float32"

    @property
    def autocast_dtype(self) -> str | None:
        """Dtype of matrix products in the trainer's forward pass; None means that autocast is off."""
        return None if self.dtype == "float32" else self.dtype

    @property
    def needs_scaler(self) -> bool:
        """Whether gradients need loss scaling: only float16 has too few exponent bits for them."""
        return self.dtype == "float16"

    @property
    def reduce_dtypes(self) -> tuple[str, ...]:
        """Dtypes in which gradients may be summed over ranks; a float16 sum may overflow even if no term does."""
        return ("float32", "bfloat16") if self.dtype == "bfloat16" else ("float32",)

    @property
    def sent_dtypes(self) -> tuple[str, ...]:
        """Dtypes in which weights may be sent: the masters' or the engine's; either way they are rounded once, and the same."""
        return ("float32",) if self.dtype == "float32" else (self.dtype, "float32")

    @property
    def engine_dtype(self) -> str:
        """Dtype of the engine's weights and matrix products, and of the weights as it stores them."""
        return self.dtype

    @property
    def kv_cache_dtypes(self) -> tuple[str, ...]:
        """Allowed dtypes of the engine's KV cache: the compute dtype, by name or as "auto", or the format asked for."""
        if self.kv_cache is None:
            return ("auto", self.dtype)
        return tuple(dict.fromkeys((self.kv_cache, _SHORT.get(self.kv_cache, self.kv_cache))))

    @property
    def logprobs_mode(self) -> str:
        """Which log-probabilities the engine must return: those that it samples from, after the temperature."""
        return "processed_logprobs"
