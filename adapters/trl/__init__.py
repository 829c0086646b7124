"""TRL's GRPOTrainer and RLOOTrainer with the `mismatch:` block; without a block they are stock, number for number."""

from mismatch_ext.versions import present

present("trl", "transformers", "accelerate")

from mismatch_ext.adapters.transformers.callback import MismatchCallback
from mismatch_ext.adapters.trl.attach import attach
from mismatch_ext.adapters.trl.config import MismatchConfigMixin, MismatchGRPOConfig, MismatchRLOOConfig
from mismatch_ext.adapters.trl.trainer import MismatchGRPOTrainer, MismatchRLOOTrainer, MismatchTrainerMixin

__all__ = [
    "MismatchCallback",
    "MismatchConfigMixin",
    "MismatchGRPOConfig",
    "MismatchGRPOTrainer",
    "MismatchRLOOConfig",
    "MismatchRLOOTrainer",
    "MismatchTrainerMixin",
    "attach",
]
