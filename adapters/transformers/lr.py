"""Learning-rate control in any transformers Trainer: a callback that puts a controller's multiplier on its optimizer."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from transformers import SchedulerType, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from mismatch_ext.config import LrConfig
from mismatch_ext.errors import ConfigError
from mismatch_ext.lr import LrControl, make_controller

logger = logging.getLogger(__name__)


class LrCallback(TrainerCallback):
    """Builds the control when training begins, and takes it off when it ends; whoever knows the statistics updates it.

    Args:
        config: The `lr` section.

    Attributes:
        lr_control: The control of the training that runs; None outside of one.
        applied: Metrics of the last optimizer step, with the multiplier that it applied.
    """

    def __init__(self, config: LrConfig) -> None:
        self.config = config
        self.lr_control: LrControl | None = None
        self.applied: dict[str, float] = {}
        self._saved: Mapping[str, Any] | None = None

    def resume(self, saved: Mapping[str, Any] | None) -> None:
        """Go on, when training begins, from what `saved_state` returned; None begins anew."""
        self._saved = saved

    def saved_state(self) -> dict[str, Any] | None:
        """Return the controller's state for a checkpoint; None where no training has begun."""
        return None if self.lr_control is None else self.lr_control.state_dict()

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        **kwargs: Any,
    ) -> None:
        """Put the control on the trainer's optimizer.

        Raises:
            ConfigError: Steps of the optimizer cannot be counted, as with DeepSpeed.
            RecordError: The state in the checkpoint is of another rule or trigger, or damaged.
        """
        self.release()
        joining = state.global_step if self._saved is None else 0
        if joining:
            logger.warning(
                "The checkpoint of step %d holds no state of mismatch.lr: its learning rate is controlled from here on, with a "
                "new baseline of the trigger.",
                joining,
            )
        try:
            self.lr_control = LrControl(
                optimizer,
                make_controller(self.config, warmup_steps=_warmup_steps(args, state.max_steps)),
                scheduler=lr_scheduler,
                step=joining,
            )
        except ConfigError as error:
            raise ConfigError(f"mismatch.lr cannot control the optimizer of this trainer: {error}") from error
        if self._saved is not None:
            self.lr_control.load_state_dict(self._saved)
        self._saved, self.applied = None, {}

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Note the multiplier while it is the one that was applied: the scheduler's step moves on to the next."""
        if self.lr_control is not None:
            self.applied = self.lr_control.metrics()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave optimizer and scheduler as they are without control."""
        self.release()

    def release(self) -> None:
        """Take the control off, if there is one."""
        if self.lr_control is not None:
            self.lr_control.remove()
        self.lr_control = None


def _warmup_steps(args: TrainingArguments, max_steps: int) -> int:
    """Return the steps of warm-up that the schedule has: `constant` takes none, whatever `warmup_steps` says."""
    return 0 if args.lr_scheduler_type == SchedulerType.CONSTANT else int(args.get_warmup_steps(max_steps))
