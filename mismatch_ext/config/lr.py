"""The `lr` section: learning-rate control."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from mismatch_ext.errors import ConfigError
from mismatch_ext.strict import require as _require
from mismatch_ext.strict import settle

Trigger = Literal["response_length", "mismatch_kl", "grad_norm", "f_tau"]


@dataclass(frozen=True, kw_only=True)
class LrConfig:
    """Lowers the learning rate when responses grow (arXiv 2602.01826): max(decay^floor(t / period), floor) times the host's own
    schedule. t counts from the end of warm-up.
    """

    period: int | None = None
    """Steps per decay; None finds it: 1.8 times the step of the surge, as in the paper."""
    decay: float = 0.5
    """Factor on the learning rate, per period."""
    floor: float = 0.1
    """Least multiplier."""
    trigger: Trigger = "response_length"
    """Statistic that is watched for a surge; the paper's is the response length."""
    surge_ratio: float = 2.0
    """Multiple of the baseline that is a surge, where noise does not ask for more. Lengths in arXiv 2602.01826 went to 3-4 times
    theirs."""
    baseline_window: int = 50
    """Batches of rollouts, from the first one on, whose median is the baseline. None surges before they are there, and a surge in
    the first half of them is not seen."""
    warmup_steps: int | None = None
    """Steps of warm-up; None takes the host's own, which is 0 where there is no host."""

    def __post_init__(self) -> None:
        settle(self, "mismatch.lr")
        section = "mismatch.lr"
        _require(self.period is None or self.period >= 1, f"{section}.period", self.period, "an integer >= 1")
        _require(0 < self.decay < 1, f"{section}.decay", self.decay, "0 < x < 1")
        _require(0 < self.floor <= 1, f"{section}.floor", self.floor, "0 < x <= 1")
        _require(self.surge_ratio > 1, f"{section}.surge_ratio", self.surge_ratio, "a number > 1")
        _require(self.baseline_window >= 1, f"{section}.baseline_window", self.baseline_window, "an integer >= 1")
        _require(
            self.warmup_steps is None or self.warmup_steps >= 0,
            f"{section}.warmup_steps",
            self.warmup_steps,
            "an integer >= 0",
        )
        if not self.watches:
            defaults = {f.name: f.default for f in dataclasses.fields(self)}
            for name in ("trigger", "surge_ratio", "baseline_window"):
                if getattr(self, name) != defaults[name]:
                    raise ConfigError(
                        f"{section}.{name}: {getattr(self, name)!r} has no effect with period={self.period}, which needs no "
                        "surge; leave out one of the two."
                    )

    @property
    def watches(self) -> bool:
        """Whether the rule waits for a surge and therefore needs the trigger's statistic from every batch."""
        return self.period is None
