"""Alarms in any transformers Trainer: a callback that checks each training log by the monitor's rules."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from mismatch_ext.config import MonitorConfig
from mismatch_ext.host_names import TRL
from mismatch_ext.monitor import ANEW, Alarm, Monitor
from mismatch_ext.verdicts import Verdicts

logger = logging.getLogger(__name__)

Sink = Callable[..., None]


class AlarmCallback(TrainerCallback):
    """Watches what the trainer logs; the main process decides, and all ranks stop together.

    Args:
        config: The `monitor` section.
        event: Writes an event: step, level, name, message, data.
        verdicts: What becomes of an alarm that stops; None lets it.

    Attributes:
        monitor: The rules and their state.
        stopped: Message of the alarm that stopped training, or None.
    """

    def __init__(self, config: MonitorConfig, event: Sink, verdicts: Verdicts | None = None) -> None:
        self.config = config
        self.verdicts = Verdicts("enforce") if verdicts is None else verdicts
        self.monitor = Monitor(config, TRL)
        self.stopped: str | None = None
        self._unsaved = False
        self._resumed = False
        self._looked = False
        self._event = event

    def begin_anew(self) -> None:
        """Forget a resumed state that no training has begun with."""
        self._resumed = False

    def resume(self, saved: Mapping[str, Any] | None, step: int) -> None:
        """Go on from the state that a checkpoint of some step holds; None begins anew."""
        self.monitor, self._resumed = Monitor(self.config, TRL), True
        for message, metrics in self.monitor.resume(saved):
            self._event(step, "info", ANEW, message, {"metrics": metrics})

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin without the alarms of an earlier training, and with losses logged as they are."""
        if not self._resumed:
            self.monitor = Monitor(self.config, TRL)
        self.stopped, self._unsaved, self._resumed, self._looked = None, False, False, False
        if not self.verdicts.observes:
            # transformers logs 0 for a loss that is NaN, unless told not to.
            args.logging_nan_inf_filter = False

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Raise what a training log calls for; a stop ends training after this step, with a checkpoint."""
        if not logs or "loss" not in logs:
            return  # an evaluation, or the sum of a training that has ended
        verdict: list[str | None] = [None]
        if state.is_world_process_zero:
            with self.verdicts.checking("alarms"):
                verdict[0] = self._watch(state.global_step, logs)
        if self.verdicts.observes:
            return
        if args.world_size > 1 and any(rule.action == "stop" for rule in self.monitor.rules.values()):
            # A metric may differ between ranks, and one that stops alone would leave the others waiting.
            broadcast_object_list(verdict)
        if verdict[0] is not None:
            self.stopped, self._unsaved = verdict[0], True
            control.should_training_stop = control.should_save = True

    def _watch(self, step: int, logs: Mapping[str, Any]) -> str | None:
        """Raise what a log calls for, and return the message of an alarm that stops; where none may, it is a finding."""
        stop = None
        self._look_for_misspelt(step, logs)
        for alarm in self.monitor.observe(step, logs):
            self._act(alarm)
            if alarm.stops and self.verdicts.observes:
                self.verdicts.found("alarm", alarm.message, step=step)
            elif alarm.stops:
                stop = alarm.message
        return stop

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Note that what a stop would lose is saved."""
        self._unsaved = False

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Ask for the checkpoint of a stop once more: `save_strategy="best"` overrules it after an evaluation."""
        control.should_save = control.should_save or self._unsaved

    def _look_for_misspelt(self, step: int, logs: Mapping[str, Any]) -> None:
        """Say at the first log which alarms it has no metric for, rather than when training has ended."""
        if self._looked:
            return
        self._looked = True
        for metric, message in self.monitor.unwatched(logs).items():
            self._event(step, "warning", "unwatched", message, {"metric": metric})
            logger.warning(message)

    def _act(self, alarm: Alarm) -> None:
        self._event(alarm.step, alarm.level, "alarm", alarm.message, alarm.to_dict())
        if alarm.status == "raised":
            logger.warning(alarm.message)
