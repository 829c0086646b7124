"""Alarms in any transformers Trainer: a callback that ends training if an alarm asks for a stop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from mismatch_ext.log import RunLog


class AlarmCallback(TrainerCallback):
    """Checks each training log for alarms; all ranks stop together.

    Args:
        log: Returns the log of the run.
    """

    def __init__(self, log: Callable[[], RunLog]) -> None:
        self._log = log
        self._unsaved = False
        self._filtered: bool | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Make the trainer log losses as they are."""
        self._unsaved = False
        if not self._log().verdicts.observes:
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
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Raise the alarms that a training log calls for; a stop ends training after this step, with a checkpoint."""
        if not logs or "loss" not in logs:
            return  # an evaluation, or the sum of a training that has ended
        if self._log().watch(state.global_step, logs) is not None:
            self._unsaved = True
            control.should_training_stop = control.should_save = True

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Note that the checkpoint of a stop was saved."""
        self._unsaved = False

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Ask for the checkpoint of a stop again, because `save_strategy="best"` overrules it after an evaluation."""
        control.should_save = control.should_save or self._unsaved
