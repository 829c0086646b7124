"""One training run: its verbs, the protocols of its two sides, and the batch that goes through it."""

from mismatch_ext.ranks import ONE_PROCESS, OneProcess, Ranks
from mismatch_ext.run.batch import Batch
from mismatch_ext.run.log import Logged
from mismatch_ext.run.run import Run
from mismatch_ext.run.sides import LoopRollout, LoopTrainer, RolloutSide, TrainerSide
from mismatch_ext.run.stepping import Stepped
from mismatch_ext.weight_sync.updates import NamedTensors

__all__ = [
    "ONE_PROCESS",
    "Batch",
    "Logged",
    "LoopRollout",
    "LoopTrainer",
    "NamedTensors",
    "OneProcess",
    "Ranks",
    "RolloutSide",
    "Run",
    "Stepped",
    "TrainerSide",
]
