"""One run of training: what it needs of its two sides, and the verbs of its loop."""

from mismatch_ext.ranks import ONE_PROCESS, OneProcess, Ranks
from mismatch_ext.run.sides import RolloutSide, TrainerSide

__all__ = ["ONE_PROCESS", "OneProcess", "Ranks", "RolloutSide", "TrainerSide"]
