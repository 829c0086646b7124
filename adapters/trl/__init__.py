"""TRL's GRPOTrainer with the `mismatch:` block; without a block it is stock GRPOTrainer, number for number."""

from mismatch_ext.adapters.trl.config import MismatchGRPOConfig
from mismatch_ext.adapters.trl.trainer import MismatchGRPOTrainer, MismatchTrainerMixin

__all__ = ["MismatchGRPOConfig", "MismatchGRPOTrainer", "MismatchTrainerMixin"]
