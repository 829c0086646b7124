"""The `lr` section in verl: a multiplier on the schedule of an actor's worker.

A step is one of verl's updates: its scheduler moves once per update, however many mini-batches and epochs that has, and `period`
and warm-up count the same.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from mismatch_ext.config import LrConfig
from mismatch_ext.errors import ConfigError, RecordError
from mismatch_ext.lr import LrControl, make_controller

logger = logging.getLogger(__name__)


class EngineLr:
    """Steers the optimizer of one engine; the driver's statistics make every rank's multiplier the same.

    Args:
        config: The `lr` section.
        optimizer: The engine's optimizer.
        scheduler: The engine's schedule; its `last_epoch` counts the updates that it has seen.
        warmup_steps: Updates of warm-up that the schedule has.

    Raises:
        ConfigError: The optimizer or schedule cannot be steered.
    """

    def __init__(self, config: LrConfig, optimizer: Any, scheduler: Any, warmup_steps: int) -> None:
        self.config = config
        self._optimizer, self._scheduler, self.warmup_steps = optimizer, scheduler, warmup_steps
        self._informed = False
        self._norm: float | None = None
        self.control = self._new()

    def _new(self) -> LrControl:
        controller = make_controller(self.config, warmup_steps=self.warmup_steps)
        control = LrControl(self._optimizer, controller, scheduler=self._scheduler, step=self._step, count_steps=False)
        control.advance(step=self._step)
        return control

    @property
    def _step(self) -> int:
        return int(self._scheduler.last_epoch)

    def update(self, **statistics: float | None) -> dict[str, float]:
        """Take the statistics of the rollouts that the next update learns from, and return what to log.

        With `trigger: grad_norm` the norm of the last update is taken where none is given: verl computes the norm in the same
        call that steps the optimizer.

        Args:
            **statistics: As `LrController.update` takes them, over all ranks.

        Raises:
            RecordError: The trigger's statistic is missing or not finite.
        """
        if self.config.trigger == "grad_norm" and statistics.get("grad_norm") is None:
            statistics |= {"responses": 0} if self._norm is None else {"grad_norm": self._norm}
        self.control.update(step=self._step, **statistics)
        self._informed = True
        return self.control.metrics()

    def before_step(self) -> None:
        """Refuse a step whose rate was to be led by statistics that nobody gave.

        Raises:
            ConfigError: There were none since the last update.
        """
        if self.config.watches and not self._informed:
            raise ConfigError(
                f"mismatch.lr.trigger={self.config.trigger!r}, but the trainer gave no statistics before this update, so no "
                "surge could be found; use verl's trainer with this package's trainer_mode, or give mismatch.lr.period."
            )

    def after_step(self, grad_norm: float) -> None:
        """Remember a gradient norm, if it is one."""
        if math.isfinite(grad_norm):
            self._norm = grad_norm

    def applied(self) -> float:
        """Return the rate that the update has applied; to be asked before the schedule moves on."""
        return float(self.control.get_last_lr()[0])

    def moved(self) -> None:
        """Follow the schedule to its next update, or stay where it stayed."""
        self._informed = False
        self.control.advance(step=self._step)

    def state_dict(self) -> dict[str, Any]:
        """Return what goes into a checkpoint, as JSON-able data."""
        return {"control": self.control.state_dict(), "grad_norm": self._norm}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on from a checkpoint, after verl has loaded optimizer and schedule; None is one without state of ours.

        Raises:
            RecordError: The state is of another rule or trigger, of another step than the schedule, or damaged.
        """
        self.control.remove()
        self.control = self._new()
        self._informed, self._norm = False, None
        if state is None:
            if self._step:
                logger.warning(
                    "The checkpoint of update %d holds no state of mismatch.lr: the rate is controlled from here on, with "
                    "multiplier %g and a new baseline of the trigger.",
                    self._step,
                    self.control.multiplier,
                )
            return
        try:
            self.control.load_state_dict(state["control"])
            self.control.advance(step=self._step)
            self._norm = state["grad_norm"]
        except (RecordError, KeyError, TypeError) as error:
            raise RecordError(
                f"mismatch.lr cannot go on from this checkpoint: {error} To begin anew instead, take `lr` out of mismatch.json "
                "in the checkpoint's actor folder."
            ) from error


def warmup_steps(optimizer_config: Any) -> int:
    """Return the updates of warm-up that verl's FSDP engine builds a schedule with."""
    if optimizer_config.lr_warmup_steps > 0:
        return int(optimizer_config.lr_warmup_steps)
    return int(optimizer_config.lr_warmup_steps_ratio * optimizer_config.total_training_steps)


class MegatronSchedule:
    """What a control asks of a torch schedule, answered by Megatron's, which verl moves by 1 in each update.

    Args:
        schedule: Megatron's `OptimizerParamScheduler`.
        optimizer: The torch optimizer whose rates it sets.
    """

    def __init__(self, schedule: Any, optimizer: Any) -> None:
        self._schedule, self._optimizer = schedule, optimizer

    @property
    def last_epoch(self) -> int:
        """Updates that the schedule has seen."""
        return int(self._schedule.num_steps)

    def get_last_lr(self) -> list[Any]:
        """Return each group's rate."""
        return [group["lr"] for group in self._optimizer.param_groups]

    def step(self) -> None:
        """Take note that Megatron's schedule has moved on: the control wraps this call."""


class ChainedLr:
    """Steers every torch optimizer inside Megatron's; all take the same statistics, so that all have the same multiplier.

    Args:
        config: The `lr` section.
        optimizers: The torch optimizers, at least one.
        schedule: Megatron's `OptimizerParamScheduler`.

    Raises:
        ConfigError: An optimizer cannot be steered.
    """

    def __init__(self, config: LrConfig, optimizers: Sequence[Any], schedule: Any) -> None:
        self._schedule = schedule
        self._views = [MegatronSchedule(schedule, optimizer) for optimizer in optimizers]
        self._rates = [
            EngineLr(config, optimizer, view, self._warmup_steps)
            for optimizer, view in zip(optimizers, self._views, strict=True)
        ]

    @property
    def _warmup_steps(self) -> int:
        return max(int(self._schedule.lr_warmup_steps), 0)

    @property
    def multiplier(self) -> float:
        """The multiplier of the next update."""
        return self._rates[0].control.multiplier

    def update(self, **statistics: float | None) -> dict[str, float]:
        """Take statistics as `EngineLr.update` does, and return what to log."""
        return [rate.update(**statistics) for rate in self._rates][0]

    def before_step(self) -> None:
        """Refuse a step as `EngineLr.before_step` does."""
        self._rates[0].before_step()

    def after_step(self, grad_norm: float) -> None:
        """Remember the norm of all parameters' gradients."""
        for rate in self._rates:
            rate.after_step(grad_norm)

    def applied(self) -> tuple[float, dict[str, float]]:
        """Return the rate that the update has applied, and what to log of it; to be asked before the schedule moves on."""
        return self._rates[0].applied(), self._rates[0].control.metrics()

    def moved(self) -> None:
        """Follow the schedule to its next update."""
        for view, rate in zip(self._views, self._rates, strict=True):
            view.step()
            rate.moved()

    def state_dict(self) -> dict[str, Any]:
        """Return what goes into a checkpoint; it is the same for every optimizer."""
        return self._rates[0].state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on from a checkpoint as `EngineLr.load_state_dict` does; warm-up is the loaded schedule's."""
        for rate in self._rates:
            rate.warmup_steps = self._warmup_steps
            rate.load_state_dict(state)
