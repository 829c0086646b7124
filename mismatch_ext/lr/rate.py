"""The `lr` section applied to a run's optimizer: it takes statistics, sets the rate, and keeps a state for checkpoints."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mismatch_ext.config import LrConfig
from mismatch_ext.errors import ConfigError, RecordError
from mismatch_ext.lr.control import LrControl
from mismatch_ext.lr.controller import LrController

logger = logging.getLogger(__name__)


class RateControl:
    """Applies a controller's multiplier to an optimizer, and gives the controller the statistics of the rollouts.

        rate = RateControl(block.lr)
        rate.attach(optimizer, scheduler, warmup=2)
        for batch in rollouts:
            rate.collect(**length_statistics(batch.lengths, batch.truncated).to_dict())
            ...                                     # loss, backward, clipping as usual
            rate.before_step()
            optimizer.step()
            rate.after_step()
            scheduler.step()
            log(rate.metrics())

    The unit of the rule depends on the host. With TRL, the rule counts the optimizer's steps. With verl, it counts updates, each
    of several optimizer steps; such a host gives `updates` to `attach`, and calls `moved` when an update is over.

    Args:
        config: The `lr` section.
        kept_in: Where a checkpoint of this host holds the state; the error of a state that cannot be loaded says it.
        required: Advice for the user if a step has no new statistics although the section watches some; such a step is
            refused with this advice. None allows such steps.

    Attributes:
        controls: The controls of the optimizers; empty while there are none.
    """

    def __init__(
        self, config: LrConfig, *, kept_in: str = "`lr` in mismatch.json", required: str | None = None
    ) -> None:
        self.config = config
        self.controls: list[LrControl] = []
        self._kept_in, self._required = kept_in, required
        self._new: Callable[[], list[LrControl]] = list
        self._updates: Callable[[], int] | None = None
        self._joined = 0
        self._collected: list[tuple[float, dict[str, float]]] = []
        self._informed = False
        self._norm: float | None = None
        self._applied: dict[str, float] = {}

    def attach(
        self,
        optimizer: Any,
        scheduler: Any = None,
        *,
        warmup: int = 0,
        step: int = 0,
        steps: int = 0,
        updates: Callable[[], int] | None = None,
    ) -> None:
        """Control an optimizer, or several that step together; an earlier control is removed.

        Args:
            optimizer: An optimizer as for `LrControl`, or a list of them.
            scheduler: The schedule, or a list with one per optimizer; optional.
            warmup: Steps of warm-up that the schedule has.
            step: Steps taken before, if control joins a running training.
            steps: Steps of the whole training, if known; otherwise 0.
            updates: Returns the updates taken before, if the rule counts updates and not the optimizer's steps.

        Raises:
            ConfigError: An optimizer or schedule cannot be controlled.
        """
        optimizers = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
        schedulers = list(scheduler) if isinstance(scheduler, Sequence) else [scheduler] * len(optimizers)
        self._updates, self._joined = updates, step

        def new() -> list[LrControl]:
            controller, made = LrController(self.config, warmup_steps=warmup), []
            for one, its in zip(optimizers, schedulers, strict=True):
                counts = None if updates is None else False
                made.append(LrControl(one, controller, scheduler=its, step=self._step(), count_steps=counts))
            return made

        self._new = new
        self._begin()
        window = self.config.baseline_window
        if self.config.watches and 0 < steps <= window:
            logger.warning(
                "mismatch.lr waits for a surge over a baseline of %d batches, and this training has %d steps: the rate will not "
                "be lowered. Set mismatch.lr.baseline_window, or give mismatch.lr.period.",
                window,
                steps,
            )

    def _begin(self) -> None:
        self.detach()
        try:
            self.controls = self._new()
        except ConfigError as error:
            raise ConfigError(f"mismatch.lr cannot control the optimizer of this trainer: {error}") from error
        self._follow()

    def _step(self) -> int:
        return self._joined if self._updates is None else self._updates()

    def _follow(self) -> None:
        if self._updates is not None:
            for control in self.controls:
                control.advance(step=self._updates())

    def detach(self) -> None:
        """Leave optimizers and schedules as they would be without control, and forget the collected statistics."""
        for control in self.controls:
            control.remove()
        self.controls, self._collected, self._applied = [], [], {}
        self._informed, self._norm = False, None

    @property
    def attached(self) -> bool:
        """Whether there is an optimizer under control."""
        return bool(self.controls)

    @property
    def control(self) -> LrControl:
        """The control of the first optimizer; the controls of the others have the same multiplier."""
        return self.controls[0]

    @property
    def multiplier(self) -> float:
        """The multiplier of the next step."""
        return self.control.multiplier

    def collect(self, weight: float = 1.0, /, **statistics: float | None) -> None:
        """Add the statistics of rollouts that the next step learns from; those of several batches are averaged by `responses`.

        Args:
            weight: Further weight of this batch in the average; 0 if it has no statistics.
            **statistics: Arguments of `LrController.update`, over all ranks. If the gradient norm is not finite, its step is
                skipped, and the call is ignored.
        """
        norm = statistics.get("grad_norm")
        if self.attached and (norm is None or math.isfinite(norm)):
            self._collected.append((weight, {name: value for name, value in statistics.items() if value is not None}))

    def lead(self) -> dict[str, float]:
        """Give the collected statistics to the controller, for the next step, and return the values to log of that step.

        With `trigger: grad_norm`, if no norm was collected, the controller gets the norm that `after_step` was last given.

        Raises:
            RecordError: The trigger's statistic is missing or not finite.
        """
        collected, self._collected = self._collected, []
        counted = [(weight * (found.get("responses") or 1.0), found) for weight, found in collected if weight]
        if not self.attached or not counted:
            return {}
        counted = [entry for entry in counted if entry[1].get("responses") != 0] or counted  # no measurement
        total = sum(weight for weight, _ in counted)
        # A statistic that some batch does not have, such as the truncated fraction, is left out of the average.
        names = set.intersection(*(set(found) for _, found in counted))
        means = {name: sum(weight * found[name] for weight, found in counted) / total for name in names}
        if self.config.trigger == "grad_norm" and "grad_norm" not in means:
            means |= {"responses": 0.0} if self._norm is None else {"grad_norm": self._norm}
        step = None if self._updates is None else self._updates()
        for control in self.controls:
            control.update(step=step, **means)
        self._informed = True
        return self.control.metrics()

    def before_step(self) -> None:
        """Give the collected statistics to the controller, just before the optimizer step.

        Raises:
            ConfigError: Nothing was collected, although statistics are required before each step.
            RecordError: The trigger's statistic is missing or not finite.
        """
        if self._collected:
            self.lead()
        elif self._required is not None and self.config.watches and not self._informed:
            raise ConfigError(
                f"mismatch.lr.trigger={self.config.trigger!r}, but the trainer gave no statistics before this update, so no "
                f"surge could be found; {self._required}, or give mismatch.lr.period."
            )

    def after_step(self, grad_norm: float | None = None) -> None:
        """Note the applied multiplier; call this before the schedule's own step, which moves on to the next multiplier.

        Args:
            grad_norm: The step's gradient norm, if it is known only now; the controller may get it with the next statistics.
        """
        if not self.attached:
            return
        if grad_norm is not None and math.isfinite(grad_norm):
            self._norm = grad_norm
        self._applied = self.control.metrics()
        if self._updates is None:
            self._informed = False

    def moved(self, *, step_over: bool = True) -> None:
        """Take over the host's count of updates, whether or not it has grown.

        Args:
            step_over: Whether the next update needs new statistics; False if the host counts several updates as one.
        """
        self._informed = self._informed and not step_over
        self._follow()

    @property
    def rate(self) -> float:
        """The first group's learning rate: the last step's until the schedule moves on, then the next step's."""
        return float(self.control.get_last_lr()[0])

    def metrics(self) -> dict[str, float]:
        """Return the values to log of the last step, with the multiplier that it applied; empty before the first step."""
        return dict(self._applied)

    def state_dict(self) -> dict[str, Any]:
        """Return the control's state and the collected statistics, as JSON-able data for a checkpoint."""
        return {
            "control": self.control.state_dict(),
            "collected": [list(entry) for entry in self._collected],
            "grad_norm": self._norm,
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on from a checkpoint, once optimizer and schedule are loaded; the control must be attached.

        Args:
            state: A state from `state_dict`, of this release or an earlier one; None if the checkpoint holds none, which gives a
                warning.

        Raises:
            RecordError: The state belongs to another rule or trigger, or is damaged.
        """
        self._begin()
        if state is None:
            if self._step():
                logger.warning(
                    "The checkpoint of step %d holds no state of mismatch.lr: the rate is controlled from here on, with "
                    "multiplier %g and a new baseline of the trigger.",
                    self._step(),
                    self.control.multiplier,
                )
            return
        try:
            for control in self.controls:
                control.load_state_dict(state["control"])
            self._follow()
            # Checkpoints of earlier releases hold one of the two: TRL's the collected statistics, verl's the norm.
            self._collected = [(weight, dict(found)) for weight, found in state.get("collected", ())]
            self._norm = state.get("grad_norm")
        except (RecordError, KeyError, TypeError, ValueError) as error:
            said = f"{error}" if isinstance(error, RecordError) else f"{type(error).__name__}: {error}."
            raise RecordError(
                f"mismatch.lr cannot go on from this checkpoint: {said} To begin anew instead, take the state of mismatch.lr out "
                f"of the checkpoint ({self._kept_in})."
            ) from error
