"""Alarms in any transformers Trainer, and the short log: a callback that reads each log before the console and the loggers do."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from mismatch_ext.log import RunLog


def is_of_step(logs: Mapping[str, Any]) -> bool:
    """Tell whether logs are the Trainer's own of a training step, which all ranks log: it adds the rate to the loss.

    Others may be a user's, on the main process alone.
    """
    return "loss" in logs and "learning_rate" in logs


class AlarmCallback(TrainerCallback):
    """Checks each training log for alarms, and leaves in a log what is to be shown; all ranks stop together.

    Args:
        log: Returns the log of the run.

    `left_out` are the metrics of the last log that callbacks after this one do not see.
    """

    def __init__(self, log: Callable[[], RunLog]) -> None:
        self._log = log
        self._trainer: Any = None
        self._finite_total = 0.0  # sum of the losses of all logs before one that was not finite
        self._unsaved = False
        self._filtered: bool | None = None
        self.left_out: dict[str, Any] = {}

    def install(self, trainer: Any) -> None:
        """Make this the first callback of a trainer, before its loggers."""
        self._trainer = trainer
        trainer.callback_handler.callbacks.insert(0, self)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Make the trainer log losses as they are, if this knows the trainer."""
        self._unsaved, self._finite_total = False, 0.0
        if self._log().checks.acts and self._trainer is not None:
            # transformers logs 0 for a loss that is NaN, unless told not to.
            self._filtered, args.logging_nan_inf_filter = args.logging_nan_inf_filter, False

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Give the arguments back as they were."""
        if self._filtered is not None:
            args.logging_nan_inf_filter, self._filtered = self._filtered, None

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Raise the alarms that a training log calls for; a stop ends training after this step, with a checkpoint."""
        if logs is None:
            return
        log = self._log()
        if is_of_step(logs):  # otherwise an evaluation, the sum of a training that has ended, or a user's
            self._forget_broken_loss(logs["loss"])
            if log.watch(state.global_step, logs) is not None:
                self._unsaved = True
                control.should_training_stop = control.should_save = True
            logs |= log.raised()
        shown = log.shown(logs)
        self.left_out = {name: logs.pop(name) for name in [*logs] if name not in shown}

    def _forget_broken_loss(self, loss: float) -> None:
        """Take a loss that is not finite out of the trainer's sums, which would keep it in every later log."""
        if self._filtered is None:
            return
        if math.isfinite(loss):
            self._finite_total = self._trainer._total_loss_scalar
            return
        # transformers subtracts the sum from itself, and NaN - NaN is no 0. A version may keep it elsewhere.
        summed = getattr(self._trainer, "_tr_loss", None)
        if summed is not None:
            summed.zero_()
        self._trainer._total_loss_scalar = self._finite_total

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Say where the checkpoint of a stop was saved."""
        if self._unsaved:
            self._log().saved(Path(args.output_dir or "") / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        self._unsaved = False

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Ask for the checkpoint of a stop again, because `save_strategy="best"` overrules it after an evaluation."""
        control.should_save = control.should_save or self._unsaved
