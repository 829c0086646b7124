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
        run: The run, whose losses have noted the statistics.
    """

    def __init__(self, run: Any) -> None:
        self._run = run

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Give the control of the rate what was noted since the last step."""
        run = self._run
        gap, lengths = run.step_gap, run.step_lengths
        run.step_gap, run.step_lengths = None, []
        if run.fresh_gap is not None:
            # These rollouts are of the weights that this step starts from.
            gap = merged(gap, run.fresh_gap)
            run.fresh_gap = None
        rate = run.lr.rate
        if rate is None or not rate.config.watches:
            return
        if rate.config.trigger == "response_length":
            counted = torch.cat([part for part, _ in lengths])
            cut = torch.cat([part for _, part in lengths])
            rate.collect(length_statistics(over_ranks(length_sums(counted, cut), run.ranks)))
        elif rate.config.trigger in ("mismatch_kl", "f_tau"):
            rate.collect(numerics_statistics(over_ranks(gap, run.ranks)))
