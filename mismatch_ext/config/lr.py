"""The `lr` section: learning-rate control."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

from mismatch_ext.errors import ConfigError
from mismatch_ext.strict import require as _require

Trigger = Literal["response_length", "mismatch_kl", "grad_norm", "f_tau"]


@dataclass(frozen=True, kw_only=True)
class SurgeConfig:
    """When a statistic counts as surging. The paper shows surges but gives no detector: all of this is a choice.

    It surges when the median of its last `smoothing` measurements reaches the largest of `ratio` * baseline, baseline +
    `noise_margin` * (robust standard deviation of the baseline's measurements), and `least`. The baseline is the median of the
    first measurements of the run, so that slow growth counts once it is large; a measurement is one batch of rollouts. Lengths
    surge as well when the fraction of truncated responses rises by 0.5 over its baseline: with half of them at the limit the
    mean cannot show growth.
    """

    baseline_window: int = 50
    """Measurements in the baseline; none surges before they are there, and one that surged in the first half of them is not
    seen."""
    ratio: float = 2.0
    """Multiple of the baseline that is a surge. Lengths in arXiv 2602.01826 went to 3-4 times theirs."""
    smoothing: int = 5
    """Measurements in the median that is compared; fewer than half of them out of line change nothing. Batches of fewer than
    8 responses need more: with 4, flat lengths fire in about one of 20 runs of 1000 batches."""
    noise_margin: float = 4.0
    """Robust standard deviations (1.4826 * median absolute deviation) above the baseline that a surge has at least."""
    least: float | None = None
    """Least value of a surge; None takes 1 token, 1e-3 nats for mismatch KL (NeMo RL's limit of a healthy run), 0.01 for
    F(tau), 0 for gradient norms."""

    def __post_init__(self) -> None:
        section = "mismatch.lr.surge"
        for name in ("baseline_window", "smoothing"):
            _require(getattr(self, name) >= 1, f"{section}.{name}", getattr(self, name), "an integer >= 1")
        _require(
            self.smoothing <= self.baseline_window,
            f"{section}.smoothing",
            self.smoothing,
            f"x <= baseline_window ({self.baseline_window})",
        )
        _require(self.ratio > 1, f"{section}.ratio", self.ratio, "a number > 1")
        _require(self.noise_margin >= 0, f"{section}.noise_margin", self.noise_margin, "a number >= 0")
        _require(self.least is None or self.least >= 0, f"{section}.least", self.least, "a number >= 0")


@dataclass(frozen=True, kw_only=True)
class LrConfig:
    """Lowers the learning rate when responses grow (arXiv 2602.01826): max(decay^floor(t / period), floor) times the host's own
    schedule."""

    period: int | None = None
    """Steps per decay; None finds it: round(`period_factor` * step of the surge)."""
    period_factor: float = 1.8
    """Period over the step of the surge, as in the paper."""
    count_from: Literal["start", "warmup_end", "surge"] = "warmup_end"
    """Where t is 0. The paper leaves it open; counted from the surge, the first decay comes after the
    collapse that the paper shows for a constant rate (surge at about 110, collapse at about 300)."""
    warmup_steps: int | None = None
    """Steps of warm-up for `warmup_end`; None takes the host's own, which is 0 where there is no host."""
    decay: float = 0.5
    """Factor on the learning rate, per period."""
    floor: float = 0.1
    """Least multiplier."""
    trigger: Trigger = "response_length"
    """Statistic that is watched for a surge; the paper's is the response length."""
    surge: SurgeConfig = field(default_factory=SurgeConfig)
    """What counts as a surge."""

    def __post_init__(self) -> None:
        section = "mismatch.lr"
        _require(self.period is None or self.period >= 1, f"{section}.period", self.period, "an integer >= 1")
        _require(self.period_factor > 0, f"{section}.period_factor", self.period_factor, "a number > 0")
        _require(
            self.warmup_steps is None or self.warmup_steps >= 0,
            f"{section}.warmup_steps",
            self.warmup_steps,
            "an integer >= 0",
        )
        _require(0 < self.decay < 1, f"{section}.decay", self.decay, "0 < x < 1")
        _require(0 < self.floor <= 1, f"{section}.floor", self.floor, "0 < x <= 1")
        if self.period is not None:
            self._refuse(f"period={self.period}", "period_factor")
        if not self.watches:
            self._refuse(f"period={self.period}, which needs no surge", "trigger", "surge")
        if self.count_from != "warmup_end":
            self._refuse(f"count_from={self.count_from!r}", "warmup_steps")

    @property
    def watches(self) -> bool:
        """Whether the rule waits for a surge and therefore needs the trigger's statistic from every batch."""
        return self.period is None or self.count_from == "surge"

    def _refuse(self, beside: str, *names: str) -> None:
        defaults = {f.name: f.default for f in dataclasses.fields(self)} | {"surge": SurgeConfig()}
        for name in names:
            if getattr(self, name) != defaults[name]:
                raise ConfigError(
                    f"mismatch.lr.{name}: {getattr(self, name)!r} has no effect with {beside}; leave out one of the two."
                )
