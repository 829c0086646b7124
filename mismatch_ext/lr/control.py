"""Multiplies the learning rate of a torch optimizer by a controller's multiplier, whatever the schedule."""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from mismatch_ext.errors import ConfigError, RecordError
from mismatch_ext.lr.controller import LrController
from mismatch_ext.lr.state import LrState


class LrControl:
    """Multiplies the learning rate of every parameter group, during `optimizer.step()` and nowhere else.

        control = LrControl(optimizer, LrController(config), scheduler=scheduler)
        for batch in rollouts:
            control.update(**length_statistics(batch.lengths, batch.truncated).to_dict())
            ...                                     # loss, backward, clipping as usual
            optimizer.step()
            log(scheduler.get_last_lr())            # the rate that was applied
            scheduler.step()

    Outside `optimizer.step()`, each `group["lr"]` is the schedule's own rate, without control. This has three effects. A
    scheduler that computes the next rate from the last one never sees a multiplied rate, whether or not it was given here. A
    rate that is set by hand is multiplied too. A checkpoint of optimizer and scheduler equals that of a stock run, and training
    goes on from it without control if the control's own state is left out.

    To log the rate, use `scheduler.get_last_lr()` or `control.get_last_lr()`. Both give the rate that the last step applied;
    after `scheduler.step()`, they give the rate that the next step will apply, unless a surge is found in between.

    A step counts only if the optimizer took it: not while gradients are accumulated, and not if a gradient scaler skipped it.
    A rate that a captured CUDA graph holds cannot be multiplied.

    Args:
        optimizer: A torch optimizer, or a wrapper that holds one as `.optimizer` (accelerate, DeepSpeed).
        controller: The rule.
        scheduler: The schedule of the rate, or a wrapper that holds it as `.scheduler`. Optional; needed only if its
            `get_last_lr` is to report the applied rate.
        step: Optimizer steps taken before, if control joins a running training without a saved state.
        count_steps: Whether to count calls of the optimizer's `step`. If False, `update` and `advance` must be given the
            step. None counts them, but is refused for a wrapper other than accelerate's: DeepSpeed's ZeRO, for example, steps
            the inner optimizer several times per step.

    Raises:
        ConfigError: There is no torch optimizer inside `optimizer`, it already has a control, `scheduler` reports no rate, or
            `count_steps` has to be given.
    """

    def __init__(
        self,
        optimizer: Any,
        controller: LrController,
        *,
        scheduler: Any = None,
        step: int = 0,
        count_steps: bool | None = None,
    ) -> None:
        self.controller = controller
        self.optimizer = innermost(optimizer)
        self.count_steps = _may_count(optimizer, self.optimizer) if count_steps is None else count_steps
        self.scheduler = _unwrapped(scheduler)
        if getattr(self.optimizer, _MARK, None) is not None:
            raise ConfigError(
                f"{type(self.optimizer).__name__} has a learning-rate control already; two would multiply. Call `remove` of "
                "the first."
            )
        if scheduler is not None and not callable(getattr(self.scheduler, "get_last_lr", None)):
            raise ConfigError(
                f"scheduler: {type(scheduler).__name__} has no get_last_lr(); give the torch scheduler, or leave it out and "
                "log `control.get_last_lr()`."
            )
        self._new = step == 0
        self._groups = len(self.optimizer.param_groups)
        self._saved: list[tuple[dict[str, Any], Any]] | None = None
        self._initialising = False
        self._unscheduled = False
        state = controller.initial_state(step)
        if self.count_steps:
            state, _ = controller.advance(state, step=step)
        self._set(state, controller.multiplier(state))
        self._reported = self.multiplier
        self._handles = [
            self.optimizer.register_step_pre_hook(self._before_step),
            self.optimizer.register_step_post_hook(self._after_step),
            self.optimizer.register_state_dict_pre_hook(lambda _: self._restore()),
        ]
        self._guard_step()
        setattr(self.optimizer, _MARK, self)
        if self.scheduler is not None:
            self._scheduler_class = type(self.scheduler)
            self.scheduler.__class__ = _reporting(self._scheduler_class, self)

    def _set(self, state: LrState, multiplier: float) -> None:
        self.state, self.multiplier = state, multiplier
        if not self._unscheduled:
            self._reported = multiplier

    def update(self, *, step: int | None = None, **statistics: float | None) -> float:
        """Take the statistics of a new batch of rollouts, and return the multiplier of the next step.

        Args:
            step: Optimizer steps taken before; only if the control does not count them.
            **statistics: Arguments of `LrController.update`, over all ranks.

        Raises:
            RecordError: As `LrController.update`.
        """
        self._set(*self.controller.update(self.state, step=self._step(step), **statistics))
        return self.multiplier

    def advance(self, *, step: int) -> float:
        """Return the multiplier of a step without a new batch, if the control does not count steps."""
        self._set(*self.controller.advance(self.state, step=self._step(step)))
        return self.multiplier

    def _step(self, step: int | None) -> int:
        if (step is None) != self.count_steps:
            raise RecordError(
                f"step={step!r} with count_steps={self.count_steps}; give `step` where the control does not count steps, and "
                "only there."
            )
        return self.state.step if step is None else step

    def get_last_lr(self) -> list[Any]:
        """Return each group's rate that the last step applied; after `scheduler.step()`, the one that the next will apply."""
        self._restore()
        return _times([group["lr"] for group in self.optimizer.param_groups], self._reported)

    def metrics(self) -> dict[str, float]:
        """Return the values to log: those of `LrController.metrics`, with the multiplier of the rate that `get_last_lr` gives."""
        return {**self.controller.metrics(self.state), "lr_multiplier": self._reported}

    def state_dict(self) -> dict[str, Any]:
        """Return the controller's state as JSON-able data; save it beside those of optimizer and scheduler."""
        return self.state.to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state, before or after optimizer and scheduler are loaded.

        Raises:
            RecordError: The state is not one of this rule and trigger.
        """
        loaded = LrState.from_dict(state)
        self._new = self._unscheduled = False
        self._set(*self.controller.advance(loaded, step=max(loaded.step, 0)))

    def remove(self) -> None:
        """Leave optimizer and scheduler as they would be without control."""
        self._restore()
        for handle in self._handles:
            handle.remove()
        if (
            vars(self.optimizer).get("step") is self._guarded
        ):  # otherwise a schedule has wrapped it since, as torch's do
            del self.optimizer.step
            vars(self.optimizer).update(self._unguarded)
        delattr(self.optimizer, _MARK)
        if self.scheduler is not None:
            self.scheduler.__class__ = self._scheduler_class

    def _guard_step(self) -> None:
        """Restore the rates after a step that raises, of which torch tells no hook."""
        step = self.optimizer.step
        self._unguarded = {name: value for name, value in vars(self.optimizer).items() if name == "step"}

        @functools.wraps(getattr(step, "__func__", step))
        def guarded(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            try:
                return step(*args, **kwargs)
            except BaseException:
                self._restore()
                raise

        self._guarded = types.MethodType(guarded, self.optimizer)
        self.optimizer.step = self._guarded  # type: ignore[method-assign]

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> None:
        self._restore()
        groups = optimizer.param_groups
        if self.count_steps and len(groups) < self._groups:
            raise ConfigError(
                f"{type(optimizer).__name__} is stepped with {len(groups)} of its {self._groups} parameter groups at a time, so "
                "its steps cannot be counted; set count_steps=False and give `step` to `update` and `advance`."
            )
        if self._new and self.count_steps and getattr(self.scheduler, "last_epoch", 0) > 1:
            raise RecordError(
                f"the schedule stands at {self.scheduler.last_epoch}, but learning-rate control is new; load the state that "
                f"was saved with it, or begin with LrControl(..., step={self.scheduler.last_epoch})."
            )
        # torch.distributed.checkpoint creates an optimizer's state by a step at rate 0, which it calls like this.
        empty = not optimizer.state and kwargs == {"closure": None}
        self._initialising = empty and all(float(group["lr"]) == 0 for group in groups)
        # This hook runs twice if an optimizer's `step` calls its parent's, or if the last step raised. The rates were restored
        # above and are multiplied again. They become new objects, because groups may share a tensor.
        self._saved = [(group, group["lr"]) for group in groups]
        for (group, _), rate in zip(self._saved, _times([g["lr"] for g in groups], self.multiplier), strict=True):
            group["lr"] = rate
        self._reported = self.multiplier

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> None:
        if self._saved is None:
            return
        self._restore()
        # A fused optimizer's `step` is called on an overflow too, and skips the update itself.
        overflow = getattr(optimizer, "found_inf", None)
        if self._initialising or (overflow is not None and bool(overflow)):
            return
        self._new, self._unscheduled = False, self.scheduler is not None
        if self.count_steps:
            self.state, self.multiplier = self.controller.advance(self.state, step=self.state.step + 1)

    def _restore(self) -> None:
        for group, rate in self._saved or ():
            group["lr"] = rate
        self._saved = None

    def _scheduled(self) -> None:
        self._unscheduled = False
        self._reported = self.multiplier


_MARK = "_mismatch_ext_lr_control"


def innermost(optimizer: Any) -> Optimizer:
    """Return the torch optimizer inside wrappers that hold it as `.optimizer`.

    Raises:
        ConfigError: There is none.
    """
    found = optimizer
    while getattr(found, "optimizer", None) is not None:
        found = found.optimizer
    if not isinstance(found, Optimizer):
        raise ConfigError(
            f"optimizer: found {type(found).__name__} inside {type(optimizer).__name__}, which is no torch.optim.Optimizer; give "
            "the torch optimizer whose `step` changes the weights."
        )
    return found


def _may_count(optimizer: Any, inner: Optimizer) -> bool:
    wrapper = optimizer
    while wrapper is not inner:
        if type(wrapper).__module__.split(".")[0] != "accelerate":
            raise ConfigError(
                f"count_steps: {type(wrapper).__name__} may step its inner {type(inner).__name__} several times per step; set "
                "count_steps=True if it steps it once, else False, and give `step` to `update` and `advance`."
            )
        wrapper = wrapper.optimizer
    return True


def _unwrapped(scheduler: Any) -> Any:
    while getattr(scheduler, "scheduler", None) is not None:
        scheduler = scheduler.scheduler
    return scheduler


def _times(rates: list[Any], multiplier: float) -> list[Any]:
    return [rate * multiplier for rate in rates]


def _reporting(kind: type[Any], control: LrControl) -> type[Any]:
    """Return a scheduler class that reports the applied rate; an attribute of the instance would enter its state_dict."""

    class Reporting(kind):  # type: ignore[misc]  # the base class is the user's
        def step(self, *args: Any, **kwargs: Any) -> Any:
            control._restore()
            result = super().step(*args, **kwargs)
            control._scheduled()
            return result

        def get_last_lr(self) -> list[Any]:
            return _times(super().get_last_lr(), control._reported)

        def __reduce_ex__(self, protocol: Any) -> Any:
            return object.__new__, (kind,), self.__getstate__()  # a copy is a stock scheduler

    Reporting.__name__, Reporting.__qualname__, Reporting.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    return Reporting
