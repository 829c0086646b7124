"""Learning-rate control in any transformers Trainer: a callback that multiplies the rate while its optimizer steps."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from accelerate.utils.deepspeed import DeepSpeedOptimizerWrapper
from transformers import SchedulerType, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from mismatch_ext.config import LrConfig
from mismatch_ext.errors import ConfigError
from mismatch_ext.lr import LrControl, innermost, warn_of_short_training
from mismatch_ext.names import TRL

LENGTH, TRUNCATED = TRL.length, "completions/clipped_ratio"
"""Names under which TRL's trainers log the lengths of their rollouts."""
WITHOUT_WARMUP = (SchedulerType.CONSTANT, SchedulerType.REDUCE_ON_PLATEAU, SchedulerType.GREEDY)


class LrCallback(TrainerCallback):
    """Puts the control on the trainer's optimizer when training begins, and takes it off when it ends.

    Args:
        config: The `lr` section.

    Attributes:
        rate: The control, to which other code gives statistics; None outside a training.
    """

    def __init__(self, config: LrConfig) -> None:
        self.config = config
        self.rate: LrControl | None = None
        self._saved: Mapping[str, Any] | None = None
        self._stepped: Any = None
        self._stock_step: Any = None

    def begin_anew(self) -> None:
        """Forget what an earlier training has left."""
        self._saved = None

    def load_state_dict(self, saved: Mapping[str, Any] | None) -> None:
        """Set what `state_dict` returned, from which the control goes on when training begins; None begins anew."""
        self._saved = saved

    def state_dict(self) -> dict[str, Any] | None:
        """Return the control's state for a checkpoint; None if no training has begun."""
        return None if self.rate is None else self.rate.state_dict()

    def metrics(self) -> dict[str, float]:
        """Return the values to log of the last step."""
        return {} if self.rate is None else self.rate.metrics()

    @property
    def applied(self) -> float:
        """Multiplier of the last step; 1 outside a training."""
        return 1.0 if self.rate is None else self.rate.last_multiplier

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        **kwargs: Any,
    ) -> None:
        """Put the control on the trainer's optimizer; raises RecordError if it cannot go on from the checkpoint's state."""
        self.release()
        if hasattr(innermost(optimizer), "optimizer_dict"):
            raise _layerwise(args)
        # A schedule that was given to the trainer may have moved before this training.
        joining = state.global_step or int(getattr(lr_scheduler, "last_epoch", 0) or 0)
        rate = LrControl(self.config, optimizer, warmup=_warmup_steps(args, state.max_steps), step=joining)
        warn_of_short_training(self.config, state.max_steps)
        saved, self._saved = self._saved, None
        if state.global_step or saved is not None:
            rate.load_state_dict(saved)
        # DeepSpeed's engine steps the wrapped optimizer in the backward pass, and then the schedule.
        self._stepped = optimizer.optimizer if isinstance(optimizer, DeepSpeedOptimizerWrapper) else optimizer
        self._stock_step = vars(self._stepped).get("step")
        stock = self._stepped.step

        @functools.wraps(stock)
        def step(*args: Any, **kwargs: Any) -> Any:
            with rate.applied():
                return stock(*args, **kwargs)

        self.rate, self._stepped.step = rate, step

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take the control off."""
        self.release()

    def release(self) -> None:
        """Leave the optimizer as it would be without the control, if there is one."""
        if self.rate is None:
            return
        self.rate.close()
        del self._stepped.step
        if self._stock_step is not None:
            self._stepped.step = self._stock_step
        self.rate = self._stepped = self._stock_step = None


def check_optimizer(args: TrainingArguments) -> None:
    """Refuse an optimizer whose rate cannot be controlled, by its name and before it is built."""
    if _text(args.optim).endswith("layerwise"):
        raise _layerwise(args)


def _layerwise(args: TrainingArguments) -> ConfigError:
    return ConfigError(
        f"mismatch.lr with optim={_text(args.optim)!r}: it steps each parameter by itself, out of reach of a common "
        "multiplier; use an optimizer that is not layer-wise."
    )


def _warmup_steps(args: TrainingArguments, max_steps: int) -> int:
    """Return the number of warm-up steps that the schedule has; some schedules have none, even if `warmup_steps` asks for it."""
    return 0 if args.lr_scheduler_type in WITHOUT_WARMUP else int(args.get_warmup_steps(max_steps))


def _text(choice: Any) -> str:
    return str(getattr(choice, "value", choice))
