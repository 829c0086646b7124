"""The state that the parts of a run share: the block, both sides, the step, and the metrics and findings to be logged."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from mismatch_ext.config import MismatchConfig
from mismatch_ext.host_names import HostNames
from mismatch_ext.ranks import Ranks, together
from mismatch_ext.run.pending import Pending
from mismatch_ext.run.sides import LoopRollout, LoopTrainer
from mismatch_ext.verdicts import Verdicts


@dataclass(kw_only=True)
class Loop:
    """Your own training loop, as the parts of its run see it.

    Args:
        block, trainer, rollout, names, seed, ranks: As in `Run`.
        steps: Number of finished optimizer steps.

    Attributes:
        pending: Metrics that were measured since the last log.
        verdicts: Decides whether a failed check ends the run or is a finding.
    """

    block: MismatchConfig
    trainer: LoopTrainer
    rollout: LoopRollout
    names: HostNames
    seed: int
    ranks: Ranks
    steps: int = 0
    pending: Pending = field(default_factory=Pending)
    verdicts: Verdicts = field(init=False)

    def __post_init__(self) -> None:
        self.verdicts = Verdicts(self.block.level, lambda: self.steps)

    def together(self, split: str = "train") -> AbstractContextManager[None]:
        """Let an error of one rank end all ranks; ranks may evaluate different numbers of batches, and do so by themselves."""
        return together(self.ranks) if split == "train" else nullcontext()
