"""The `lr` section in verl: a multiplier on the schedule of an actor's worker.

A step is one of verl's updates. verl's scheduler moves once per update, however many mini-batches and epochs the update has, and
`period` and warm-up count updates too. In `separate_async`, the `parameter_sync_step` local updates between two weight updates
are one step. Every rank gets the driver's statistics, so all multipliers are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mismatch_ext.config import LrConfig
from mismatch_ext.lr import RateControl

KEPT_IN = "`lr` in mismatch.json of its actor folder"
REQUIRED = "use verl's trainer with this package's trainer_mode"


def rate_of(config: LrConfig) -> RateControl:
    """Return the control of an engine's rate, which refuses an update if the driver gave no statistics before it."""
    return RateControl(config, kept_in=KEPT_IN, required=REQUIRED)


def warmup_steps(optimizer_config: Any) -> int:
    """Return how many updates of warm-up the schedule of verl's FSDP engine has."""
    if optimizer_config.lr_warmup_steps > 0:
        return int(optimizer_config.lr_warmup_steps)
    return int(optimizer_config.lr_warmup_steps_ratio * optimizer_config.total_training_steps)


class MegatronSchedule:
    """The part of a torch schedule that a control uses, on top of Megatron's schedule, which verl moves by 1 in each update.

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


class MegatronRate(RateControl):
    """Controls every torch optimizer inside Megatron's.

    Args:
        config: The `lr` section.
        optimizers: The torch optimizers, at least one.
        schedule: Megatron's `OptimizerParamScheduler`.

    Raises:
        ConfigError: An optimizer cannot be controlled.
    """

    def __init__(self, config: LrConfig, optimizers: Sequence[Any], schedule: Any) -> None:
        super().__init__(config, kept_in=KEPT_IN, required=REQUIRED)
        self._optimizers, self._schedule = list(optimizers), schedule
        self._views = [MegatronSchedule(schedule, optimizer) for optimizer in self._optimizers]
        self.put_on()

    def put_on(self) -> None:
        """Attach to the optimizers, with the warm-up that the schedule has now: a checkpoint may hold another."""
        warmup = max(int(self._schedule.lr_warmup_steps), 0)
        self.attach(self._optimizers, self._views, warmup=warmup, updates=lambda: int(self._schedule.num_steps))

    def moved(self, *, step_over: bool = True) -> None:
        """Follow Megatron's schedule to its next update."""
        for view in self._views:
            view.step()
        super().moved(step_over=step_over)
