"""TRL's AsyncGRPOTrainer with the `mismatch:` block; without a block it is stock, number for number."""

from mismatch_ext.adapters.trl.async_grpo.config import MismatchAsyncGRPOConfig
from mismatch_ext.adapters.trl.async_grpo.trainer import MismatchAsyncGRPOTrainer, MismatchAsyncMixin

__all__ = ["MismatchAsyncGRPOConfig", "MismatchAsyncGRPOTrainer", "MismatchAsyncMixin"]
