"""The rule for the learning rate: pure functions from state and statistics to state and multiplier."""

from __future__ import annotations

import dataclasses
import math

from mismatch_ext.config import LrConfig
from mismatch_ext.errors import RecordError
from mismatch_ext.lr.state import LrState
from mismatch_ext.lr.surge import Measurement, SurgeDetector

PERIOD_FACTOR = 1.8
"""Period over the step of the surge (arXiv 2602.01826)."""


class LrController:
    """The paper's rule for the multiplier of the learning rate (arXiv 2602.01826): decay every `period` steps down to a floor.

        multiplier(t) = max(decay^floor(t / period), floor),   period = round(1.8 * T_surge) unless given

    t counts from the end of warm-up. The paper leaves open where; counted from the surge, the first decay would come after the
    collapse that it shows for a constant rate (surge at about 110, collapse at about 300). Until a surge that is needed is found,
    the multiplier is 1. Only one surge is looked for. The multiplier is a function of step, period and surge, so no error
    accumulates over steps.

    A step is an optimizer step that changes the weights; its number is how many steps came before it. Call `update` for a batch
    of rollouts, with the batch's statistics. Call `advance` for a step without a new batch (another optimizer step on the same
    rollouts, or one whose gradients were accumulated). Both return the multiplier of that step. It follows for

    * gradient accumulation: the number stays the same until the optimizer steps. Only the first measurement of a step counts;
      a repeated call returns the same state and multiplier. Give the statistics of the whole batch, not of a micro-batch.
    * several optimizer steps per rollout: call `update` once. For the other steps call `advance`, or nothing: steps may be
      left out. Surge and period are both counted in steps, so a period that is found covers the same number of rollouts.
    * a step skipped because float16 gradients overflowed: the number stays, and the next batch has the same one.
    * resuming: load the state that was saved with the weights. A step before the state's is refused, and so is a new state
      at a step that is not the first.

    Args:
        config: The `lr` section.
        warmup_steps: The host's own steps of warm-up.
    """

    def __init__(self, config: LrConfig, warmup_steps: int = 0) -> None:
        self.config = config
        self.warmup_steps = warmup_steps if config.warmup_steps is None else config.warmup_steps
        self.detector = SurgeDetector(config) if config.watches else None

    def initial_state(self, step: int = 0) -> LrState:
        """Return the state before a first step.

        Args:
            step: That step, if control joins a run that has already taken steps. The rule's t still counts from the run's
                start.
        """
        if step < 0:
            raise RecordError(f"step={step!r} cannot be a first step; give the number of optimizer steps taken, >= 0.")
        return LrState(trigger=self.config.trigger, step=step - 1)

    def multiplier(self, state: LrState) -> float:
        """Return the multiplier of the state's step."""
        period = self.period(state)
        if period is None:
            return 1.0
        return max(self.config.decay ** (max(state.step - self.warmup_steps, 0) // period), self.config.floor)

    def advance(self, state: LrState, *, step: int) -> tuple[LrState, float]:
        """Return state and multiplier of a step that has no new batch of rollouts.

        Raises:
            RecordError: The step is before the state's, or the state is new and the step is not its first.
        """
        if state.trigger != self.config.trigger:
            raise RecordError(
                f"the state is of trigger {state.trigger!r}, the controller of trigger {self.config.trigger!r}; set mismatch.lr "
                "back to what saved the state, or begin with `initial_state(step)`."
            )
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise RecordError(
                f"step={step!r} cannot be; give the number of optimizer steps taken before, an integer >= 0."
            )
        if step < state.step:
            raise RecordError(
                f"step {step} comes after step {state.step}; the weights went back to an earlier checkpoint but the state "
                "of learning-rate control did not. Load the state that was saved with the weights."
            )
        if state.step == -1 and step > 1:
            raise RecordError(
                f"the first step of a new state of learning-rate control is {step}; load the state that was saved with the "
                f"weights, or begin with `initial_state({step})`."
            )
        state = dataclasses.replace(state, step=step)
        return state, self.multiplier(state)

    def update(
        self,
        state: LrState,
        *,
        step: int,
        response_length: float | None = None,
        truncated_fraction: float | None = None,
        mismatch_kl: float | None = None,
        grad_norm: float | None = None,
        f_tau: float | None = None,
        responses: float | None = None,
    ) -> tuple[LrState, float]:
        """Take the statistics of a batch of rollouts over all ranks, and return state and multiplier of the step.

        Args:
            state: State before; it is not changed.
            step: Optimizer steps taken before this one.
            response_length: Mean tokens per response, truncated responses included.
            truncated_fraction: Fraction of responses cut off at the length limit; None if unknown.
            mismatch_kl: KL between rollout and trainer policy in nats per token, by an estimate that is never negative (k3).
            grad_norm: Norm of the gradient before clipping.
            f_tau: Fraction of tokens whose probability ratio, or its inverse, exceeds a threshold.
            responses: Number of responses. 0 makes the call an `advance`: an empty batch has no statistics.

        Raises:
            RecordError: The trigger's statistic is missing, or a statistic is not finite, negative or above its maximum; names
                the statistic. Also as `advance`.
        """
        given = {
            "response_length": response_length,
            "truncated_fraction": truncated_fraction,
            "mismatch_kl": mismatch_kl,
            "grad_norm": grad_norm,
            "f_tau": f_tau,
        }
        if _checked("responses", responses, step) == 0:
            return self.advance(state, step=step)
        known = {name: _checked(name, number, step) for name, number in given.items()}
        advanced, _ = self.advance(state, step=step)
        value = known[self.config.trigger]
        if self.detector is None:
            return advanced, self.multiplier(advanced)
        if value is None:
            raise RecordError(
                f"step {step}: {self.config.trigger} is missing, and mismatch.lr.trigger={self.config.trigger!r} needs it of "
                "every batch. Give it, or call `advance` at a step without a new batch."
            )
        if advanced.measured_step != step:
            advanced = dataclasses.replace(advanced, measured_step=step)
            measurement = Measurement(step=step, value=value, truncated=known["truncated_fraction"])
            advanced = self._measured(advanced, measurement, self.detector)
        return advanced, self.multiplier(advanced)

    def metrics(self, state: LrState) -> dict[str, float]:
        """Return the values to log; values that are not known yet are left out."""
        found: dict[str, float | None] = {
            "lr_multiplier": self.multiplier(state),
            "lr_surges": float(state.triggers),
            "lr_surge_step": state.surge_step,
            "lr_period": self.period(state),
        }
        if self.detector is not None and state.surge.baseline is not None:
            found["lr_surge_threshold"] = self.detector.threshold(state.surge.baseline)
        return {name: float(number) for name, number in found.items() if number is not None}

    def period(self, state: LrState) -> int | None:
        """Return the steps per decay; None before the surge that decides them."""
        if self.config.period is not None or state.surge_step is None:
            return self.config.period
        return max(1, round(PERIOD_FACTOR * state.surge_step))

    def _measured(self, state: LrState, measurement: Measurement, detector: SurgeDetector) -> LrState:
        if state.surge_step is not None:
            return state
        surge, found = detector.observe(state.surge, measurement)
        if found is None:
            return dataclasses.replace(state, surge=surge)
        surge = dataclasses.replace(surge, history=())
        return dataclasses.replace(state, surge=surge, triggers=1, surge_step=found, found_step=measurement.step)


def _checked(name: str, number: float | None, step: int) -> float | None:
    if number is None:
        return None
    most = 1.0 if name in ("truncated_fraction", "f_tau") else math.inf
    try:
        plain = float(number)
    except (TypeError, ValueError):
        plain = math.nan
    if math.isfinite(plain) and 0 <= plain <= most:
        return plain
    hints = {
        "mismatch_kl": "a k1 estimate can be negative, k3 cannot",
        "grad_norm": "a step that overflowed is no measurement, call `advance` for it",
    }
    allowed = "a finite number >= 0" if most > 1 else "0 <= x <= 1"
    hint = hints.get(name, "an empty batch has no statistics, give responses=0 or call `advance`")
    raise RecordError(f"step {step}: {name}={number!r} cannot lead the learning rate; allowed: {allowed} ({hint}).")
