"""Learning-rate control in any transformers Trainer: a callback that multiplies its optimizer's rate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from transformers import SchedulerType, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from mismatch_ext.config import LrConfig
from mismatch_ext.errors import ConfigError
from mismatch_ext.lr import RateControl
from mismatch_ext.lr.control import innermost
from mismatch_ext.names import TRL

LENGTH, TRUNCATED = TRL.length, "completions/clipped_ratio"
"""Names under which TRL's trainers log the lengths of their rollouts."""
KEPT_IN = "`lr` in mismatch.json, or in trainer_state.json under MismatchCallback"
WITHOUT_WARMUP = (SchedulerType.CONSTANT, SchedulerType.REDUCE_ON_PLATEAU, SchedulerType.GREEDY)


class LrCallback(TrainerCallback):
    """Attaches the rate's control when training begins, and takes it off when it ends; other code collects its statistics.

    Args:
        config: The `lr` section.

    Attributes:
        rate: The control of the rate.
    """

    def __init__(self, config: LrConfig) -> None:
        self.config = config
        self.rate = RateControl(config, kept_in=KEPT_IN)
        self._saved: Mapping[str, Any] | None = None

    def resume(self, saved: Mapping[str, Any] | None) -> None:
        """Set what `saved_state` returned, from which the control goes on when training begins; None begins anew."""
        self._saved = saved

    def saved_state(self) -> dict[str, Any] | None:
        """Return the control's state for a checkpoint; None if no training has begun."""
        return self.rate.state_dict() if self.rate.attached else None

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
            ConfigError: Steps of the optimizer cannot be counted.
            RecordError: The state in the checkpoint belongs to another rule or trigger, or is damaged.
        """
        self.release()
        if hasattr(innermost(optimizer), "optimizer_dict"):
            raise _layerwise(args)
        warmup = _warmup_steps(args, state.max_steps)
        # A schedule that was given to the trainer may have moved before this training.
        joining = state.global_step or int(getattr(lr_scheduler, "last_epoch", 0) or 0)
        self.rate.attach(
            optimizer, lr_scheduler, warmup=warmup, step=joining, steps=state.max_steps, updates=self._updates()
        )
        saved, self._saved = self._saved, None
        if state.global_step or saved is not None:
            self.rate.load_state_dict(saved)

    def _updates(self) -> Callable[[], int] | None:
        """Return a function that counts the updates, or None if calls of the optimizer's `step` count them."""
        return None

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Let what was collected since the last step lead this one."""
        self.rate.before_step()

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Note the multiplier that was applied, before it changes."""
        self.rate.after_step()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave optimizer and scheduler as they would be without the control."""
        self.release()

    def release(self) -> None:
        """Take the control off, if there is one."""
        self.rate.detach()


class EngineLr(LrCallback):
    """Controls the rate of an optimizer that DeepSpeed's engine steps, inside the backward pass and before callbacks are called.

    The gradient norm of a step is known only after it, so with `trigger: grad_norm` it sets the rate of the next step.

    Args:
        config: The `lr` section.
        engine: Returns DeepSpeed's engine, once training has begun.
    """

    def __init__(self, config: LrConfig, engine: Callable[[], Any]) -> None:
        super().__init__(config)
        self._engine = engine
        self._watched: Any = None

    def _updates(self) -> Callable[[], int]:
        engine = self._watched = self._engine()
        plain = engine.step

        def step(*args: Any, **kwargs: Any) -> Any:
            self.rate.before_step()
            result = plain(*args, **kwargs)
            if engine.was_step_applied():
                self.rate.after_step()
            self.rate.moved()
            return result

        # Replaced on this engine only.
        engine.step = step
        return lambda: int(engine.global_steps - engine.skipped_steps)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Do nothing: the step has been taken."""

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Do nothing: the step has been taken."""

    def release(self) -> None:
        """Take the control off, and leave the engine's `step` as it was."""
        watched, self._watched = self._watched, None
        if watched is not None:
            vars(watched).pop("step", None)
        super().release()


def check_optimizer(args: TrainingArguments) -> None:
    """Refuse an optimizer whose rate cannot be controlled, by its name and before it is built.

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
    """Return the number of warm-up steps that the schedule has; some schedules have none, even if `warmup_steps` asks for it."""
    return 0 if args.lr_scheduler_type in WITHOUT_WARMUP else int(args.get_warmup_steps(max_steps))


def _text(choice: Any) -> str:
    return str(getattr(choice, "value", choice))
