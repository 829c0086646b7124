"""The coefficient of the KL term: constant, or adapted so that the KL approaches a target."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mismatch_ext.errors import ConfigError, RecordError

STATE_VERSION = 1
PROPORTIONAL = 0.1  # a choice: with errors at their clip, 2 % of the coefficient in the direction of the error
INTEGRAL = 0.05  # a choice: at most 1 % of the coefficient a step
MAX_ERROR = 0.2  # Ziegler et al. 2019
MIN_COEF, MAX_COEF = 1e-6, 10.0  # a choice


@dataclass(frozen=True, kw_only=True)
class KlControllerState:
    """What a controller carries from step to step.

    Args:
        coef: Coefficient of the next step.
        integral: Accumulated error times its gain, in nats of log-coefficient.
        steps: Measurements seen.
    """

    coef: float
    integral: float = 0.0
    steps: int = 0


class KlController:
    """Constant coefficient, or a PI controller with anti-windup in the logarithm of the coefficient.

        e = clip(measured / target_kl - 1, +-MAX_ERROR)   relative error, as in Ziegler et al. 2019
        integral += INTEGRAL * e                          undone if e pushes log coef below further out of bounds
        log coef = log initial + integral + PROPORTIONAL * e   then clipped to [MIN_COEF, MAX_COEF]

    Because the integral does not grow at a bound, the first error of the other sign takes the coefficient off the bound, however
    long it was there.

    Args:
        initial: First coefficient, > 0.
        target_kl: Wanted KL, nats per token; None keeps the coefficient constant.

    Raises:
        ConfigError: `initial` is not a positive number, or lies outside the controller's bounds.
    """

    def __init__(self, initial: float, target_kl: float | None = None) -> None:
        if not (math.isfinite(initial) and initial > 0):
            raise ConfigError(f"mismatch.kl.coef: {initial!r} is not allowed to start from; allowed: a number > 0.")
        if target_kl is not None and not MIN_COEF <= initial <= MAX_COEF:
            raise ConfigError(
                f"mismatch.kl.coef: {initial!r} is not allowed with target_kl; allowed: {MIN_COEF:g} to {MAX_COEF:g}."
            )
        self.initial = initial
        self.target_kl = target_kl
        self.state = KlControllerState(coef=initial)

    @property
    def coef(self) -> float:
        """Coefficient of the next step."""
        return self.state.coef

    def step(self, state: KlControllerState, measured_kl: float) -> tuple[KlControllerState, float]:
        """Return the state after a measurement, and its coefficient; the controller itself stays unchanged.

        Args:
            state: State before.
            measured_kl: KL divergence from the reference, nats per token; a sampled estimate may be negative.

        Raises:
            RecordError: The measurement is NaN or infinite; a constant coefficient is kept, with a warning.
        """
        measured_kl = float(measured_kl)
        if not math.isfinite(measured_kl):
            broken = (
                f"the measured KL is {measured_kl} after {state.steps} measurements; a coefficient cannot be led by it. "
                "Look for broken weights or an overflow in the log-probabilities."
            )
            if self.target_kl is not None:
                raise RecordError(broken)
            warnings.warn(broken, stacklevel=3)
            return state, state.coef
        if self.target_kl is None:
            return KlControllerState(coef=state.coef, integral=state.integral, steps=state.steps + 1), state.coef
        error = min(max(measured_kl / self.target_kl - 1, -MAX_ERROR), MAX_ERROR)
        low, high = math.log(MIN_COEF), math.log(MAX_COEF)
        integral = state.integral + INTEGRAL * error
        wanted = math.log(self.initial) + integral + PROPORTIONAL * error
        if (wanted > high and error > 0) or (wanted < low and error < 0):
            integral = state.integral
        if wanted >= high:
            coef = MAX_COEF
        else:
            coef = math.exp(wanted) if wanted > low else MIN_COEF
        return KlControllerState(coef=coef, integral=integral, steps=state.steps + 1), coef

    def update(self, measured_kl: float) -> float:
        """Take a measurement and return the coefficient of the next step; see `step`."""
        self.state, coef = self.step(self.state, measured_kl)
        return coef

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON-able data."""
        return {
            "version": STATE_VERSION,
            "initial": self.initial,
            "coef": self.state.coef,
            "integral": self.state.integral,
            "steps": self.state.steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> str | None:
        """Go on from a saved state, with this controller's settings; a constant coefficient is one of these settings.

        If an adaptive controller's saved first coefficient is another one, it starts again from its own: the saved coefficient
        and integral depend on the other.

        Returns:
            A sentence if the coefficient is no longer the saved one; otherwise None.

        Raises:
            RecordError: The state has another version, a missing or unknown key, or a value that no controller could have saved.
        """
        expected = set(self.state_dict())
        if state.get("version") != STATE_VERSION or set(state) != expected:
            raise RecordError(
                f"a KL controller's state of version {state.get('version')!r} with keys {sorted(state)} cannot be "
                f"loaded; expected version {STATE_VERSION} with keys {sorted(expected)}."
            )
        numbers = {key: state[key] for key in ("initial", "coef", "integral", "steps")}
        for key, value in numbers.items():
            number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            if not number or (key == "initial" and value <= 0) or (key in ("coef", "steps") and value < 0):
                raise RecordError(
                    f"a KL controller's state holds {key}={value!r}, which cannot be; is the file damaged?"
                )
        before, reached = float(numbers["initial"]), float(numbers["coef"])
        if self.target_kl is not None and before != self.initial:
            self.state = KlControllerState(coef=self.initial)
            return (
                f"mismatch.kl.coef was {before:g} and is {self.initial:g}: the KL controller, which had come to {reached:g}, "
                f"begins anew from {self.initial:g}."
            )
        if self.target_kl is None:  # a schedule of the host's may have moved it since, and will again
            reached = before
        coef = self.initial if self.target_kl is None else reached
        self.state = KlControllerState(coef=coef, integral=float(numbers["integral"]), steps=int(numbers["steps"]))
        return None if coef == reached else f"the KL coefficient was {reached:g} in the checkpoint and is {coef:g} now."
