"""Statistics that lead the learning rate of a step: those of the rollouts that it learns from, over all ranks."""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from mismatch_ext.lr import length_statistics, length_sums, numerics_statistics
from mismatch_ext.sums import merged, over_ranks


class Leading(TrainerCallback):
    """Collects the statistics before each step; it runs before the callback that sets the rate on the optimizer.

    Args:
        trainer: The trainer, whose losses have noted the statistics.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Give the control of the rate what was noted since the last step."""
        trainer = self._trainer
        gap, lengths = trainer._step_gap, trainer._step_lengths
        trainer._step_gap, trainer._step_lengths = None, []
        if trainer._fresh_gap is not None:
            # These rollouts are of the weights that this step starts from.
            gap = merged(gap, trainer._fresh_gap)
            trainer._fresh_gap = None
        rate = trainer._lr.rate
        if rate is None or not rate.config.watches:
            return
        if rate.config.trigger == "response_length":
            counted = torch.cat([part for part, _ in lengths])
            cut = torch.cat([part for _, part in lengths])
            rate.collect(length_statistics(over_ranks(length_sums(counted, cut), trainer._ranks)))
        elif rate.config.trigger in ("mismatch_kl", "f_tau"):
            rate.collect(numerics_statistics(over_ranks(gap, trainer._ranks)))
