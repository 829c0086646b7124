"""Learning-rate control in any transformers Trainer: a callback that multiplies its optimizer's rate."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from transformers import SchedulerType, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from mismatch_ext.config import LrConfig
from mismatch_ext.errors import ConfigError, RecordError
from mismatch_ext.lr import LrControl, make_controller
from mismatch_ext.lr.control import innermost
from mismatch_ext.verdicts import Verdicts

logger = logging.getLogger(__name__)

WITHOUT_WARMUP = (SchedulerType.CONSTANT, SchedulerType.REDUCE_ON_PLATEAU, SchedulerType.GREEDY)


class LrCallback(TrainerCallback):
    """Builds the control when training begins, and takes it off when it ends; whoever knows the statistics updates it.

    Args:
        config: The `lr` section.

    Attributes:
        lr_control: The control of the training that runs; None outside of one.
        applied: Metrics of the last optimizer step, with the multiplier that it applied.
        acts: Whether the multiplier is on the trainer's optimizer.
    """

    acts = True

    def __init__(self, config: LrConfig) -> None:
        self.config = config
        self.lr_control: LrControl | None = None
        self.applied: dict[str, float] = {}
        self._saved: Mapping[str, Any] | None = None
        self._collected: list[tuple[float, dict[str, float]]] = []

    def resume(self, saved: Mapping[str, Any] | None) -> None:
        """Go on, when training begins, from what `saved_state` returned; None begins anew."""
        self._saved = saved

    def collect(self, weight: float, **statistics: float) -> None:
        """Add the statistics of rollouts that the next optimizer step learns from; several batches of them are averaged.

        Args:
            weight: Of this batch in the average; 0 where it has no statistics.
            **statistics: As `LrController.update` takes them, over all ranks.
        """
        if self.lr_control is not None:
            self._collected.append((weight, statistics))

    def saved_state(self) -> dict[str, Any] | None:
        """Return control and what was collected for the next step, for a checkpoint; None where no training has begun."""
        if self.lr_control is None:
            return None
        return {"control": self.lr_control.state_dict(), "collected": [list(entry) for entry in self._collected]}

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
        if hasattr(innermost(optimizer), "optimizer_dict"):
            raise _layerwise(args)
        joining = 0
        if self._saved is None:
            # A schedule that was given to the trainer may have moved before this training.
            joining = state.global_step or int(getattr(lr_scheduler, "last_epoch", 0) or 0)
        try:
            self.lr_control = LrControl(
                optimizer,
                make_controller(self.config, warmup_steps=_warmup_steps(args, state.max_steps)),
                scheduler=lr_scheduler,
                step=joining,
            )
            if self._saved is not None:
                self.lr_control.load_state_dict(self._saved["control"])
        except ConfigError as error:
            raise ConfigError(f"mismatch.lr cannot control the optimizer of this trainer: {error}") from error
        except RecordError as error:
            raise RecordError(
                f"mismatch.lr cannot go on from this checkpoint: {error} To begin anew instead, take the state of mismatch.lr "
                "out of the checkpoint (`lr` in mismatch.json, or in trainer_state.json under MismatchCallback)."
            ) from error
        if state.global_step and self._saved is None:
            logger.warning(
                "The checkpoint of step %d holds no state of mismatch.lr: the rate is controlled from here on, with multiplier "
                "%g and a new baseline of the trigger.",
                state.global_step,
                self.lr_control.multiplier,
            )
        window = self.config.surge.baseline_window
        if self.config.watches and 0 < state.max_steps <= window:
            logger.warning(
                "mismatch.lr waits for a surge over a baseline of %d batches, and this training has %d steps: the rate will not "
                "be lowered. Set mismatch.lr.surge.baseline_window, or give mismatch.lr.period.",
                window,
                state.max_steps,
            )
        collected = [] if self._saved is None else self._saved["collected"]
        self._collected = [(weight, dict(statistics)) for weight, statistics in collected]
        self._saved, self.applied = None, {}

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Update the control by what was collected since the last step."""
        collected, self._collected = self._collected, []
        total = sum(weight for weight, _ in collected)
        if self.lr_control is None or total == 0:
            return
        names = {name for _, statistics in collected for name in statistics}
        means: dict[str, Any] = {name: sum(w * found[name] for w, found in collected if w) / total for name in names}
        self.lr_control.update(**means)

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


class ObservedLr(LrCallback):
    """Computes what the control would have made of the rate, on an optimizer of its own: the trainer's is left alone.

    Args:
        config: The `lr` section.
        verdicts: What becomes of what it refuses.
    """

    acts = False

    def __init__(self, config: LrConfig, verdicts: Verdicts) -> None:
        super().__init__(config)
        self._verdicts = verdicts
        self._shadow: torch.optim.Optimizer | None = None

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        **kwargs: Any,
    ) -> None:
        """Put the control on an optimizer that stands in for the trainer's: it has the rate 1, and steps with it."""
        with self._verdicts.checking("lr"):
            if hasattr(innermost(optimizer), "optimizer_dict"):
                raise _layerwise(args)
        weight = torch.zeros(1, requires_grad=True)
        weight.grad = torch.zeros(1)
        self._shadow = torch.optim.SGD([weight], lr=1.0)
        with self._verdicts.checking("lr"):
            super().on_train_begin(args, state, control, optimizer=self._shadow, lr_scheduler=None, **kwargs)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Update the control by what was collected since the last step."""
        with self._verdicts.checking("lr"):
            super().on_pre_optimizer_step(args, state, control)

    def on_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        """Step as the trainer's optimizer did, and note the multiplier that would have been applied."""
        with self._verdicts.checking("lr"):
            if self._shadow is not None and not getattr(optimizer, "step_was_skipped", False):
                self._shadow.step()
            super().on_optimizer_step(args, state, control)


def check_optimizer(args: TrainingArguments) -> None:
    """Refuse, by its name and before it is built, an optimizer that the rate of cannot be controlled.

    Raises:
        ConfigError: It is layer-wise.
    """
    if _text(args.optim).endswith("layerwise"):
        raise _layerwise(args)


def _layerwise(args: TrainingArguments) -> ConfigError:
    return ConfigError(
        f"mismatch.lr with optim={_text(args.optim)!r}: it steps each parameter by itself, out of reach of a common "
        "multiplier; use an optimizer that is not layer-wise."
    )


def _warmup_steps(args: TrainingArguments, max_steps: int) -> int:
    """Return the steps of warm-up that the schedule has: some take none, whatever `warmup_steps` says."""
    return 0 if args.lr_scheduler_type in WITHOUT_WARMUP else int(args.get_warmup_steps(max_steps))


def _text(choice: Any) -> str:
    return str(getattr(choice, "value", choice))
