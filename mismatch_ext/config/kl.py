"""The `kl` section: regularisation towards the reference policy."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from mismatch_ext.errors import ConfigError
from mismatch_ext.strict import require as _require


@dataclass(frozen=True, kw_only=True)
class KlControllerConfig:
    """Adapts the KL coefficient towards a target: a PI controller with anti-windup, in the logarithm of the coefficient."""

    target_kl: float
    """Wanted KL divergence from the reference policy, nats per token."""
    proportional: float = 0.1
    """Gain of the relative error (KL / target - 1, clipped to +-`max_error`)."""
    integral: float = 0.05
    """Gain of the accumulated relative error."""
    max_error: float = 0.2
    """Relative errors are clipped to this, as in Ziegler et al. 2019."""
    min_coef: float = 1e-6
    """Least coefficient; the integral stops growing while the coefficient stands at a bound."""
    max_coef: float = 10.0
    """Largest coefficient."""

    def __post_init__(self) -> None:
        section = "mismatch.kl.controller"
        for name in ("target_kl", "max_error", "min_coef"):
            _require(getattr(self, name) > 0, f"{section}.{name}", getattr(self, name), "a number > 0")
        for name in ("proportional", "integral"):
            _require(getattr(self, name) >= 0, f"{section}.{name}", getattr(self, name), "a number >= 0")
        _require(
            self.max_coef >= self.min_coef, f"{section}.max_coef", self.max_coef, f"x >= min_coef ({self.min_coef:g})"
        )


@dataclass(frozen=True, kw_only=True)
class KlConfig:
    """KL regularisation towards the reference policy, with the gradient that it claims (arXiv 2512.21852)."""

    preset: Literal["trl"] | None = None
    """`trl` leaves the KL term to TRL, unchanged: k3 in the loss, times the differentiable ratio pi/pi_old where
    `use_bias_correction_kl` is True, as it is by default since TRL 1.10. Its gradient is then that of the per-token reverse
    KL, without credit to earlier tokens; with False, on-policy, that of the per-token forward KL. The other keys then stay
    unset. Without the preset `use_bias_correction_kl` has no effect: `ratio` takes its place."""
    estimator: Literal["k1", "k2", "k3", "abs", "full"] = "k1"
    """Estimator of the log-ratio d = log pi - log pi_ref; `full` is exact over the vocabulary and needs logits."""
    placement: Literal["loss", "reward", "both"] | None = None
    """Path-wise part (`loss`), score-function part (`reward`), or `both`; None takes `reward` for k1, `loss` for k2
    (unbiased for target `token` only) and `both` for the others (abs is biased everywhere)."""
    target: Literal["token", "sequence"] = "sequence"
    """`sequence` credits later KL to earlier tokens; `token` regularises each token given its prefix."""
    ratio: Literal["none", "token", "sequence"] = "none"
    """Importance ratio pi/mu on the KL term, for samples of a rollout policy mu that differs from pi."""
    coef: float | None = None
    """Coefficient beta, the same on both parts; None takes the host's own (`beta` in TRL)."""
    reward_path: Literal["surrogate", "rewards"] = "surrogate"
    """Score-function part as a `surrogate` loss term, which group normalisation cannot rescale, or inside the `rewards`."""
    baseline: Literal["none", "leave_one_out"] = "leave_one_out"
    """Baseline of the surrogate's score-function part: the mean over other samples of the prompt keeps its expectation."""
    controller: KlControllerConfig | None = None
    """Adaptive coefficient, starting at `coef`; absent keeps it constant."""

    @property
    def in_rewards(self) -> bool:
        """Whether a part of the KL enters the host's rewards, before they become advantages."""
        return self.preset is None and self.placement != "loss" and self.reward_path == "rewards"

    @property
    def in_loss(self) -> bool:
        """Whether a part of the KL is a term of this package in the host's loss."""
        return self.preset is None and not (self.placement == "reward" and self.reward_path == "rewards")

    @property
    def has_baseline(self) -> bool:
        """Whether the term in the loss subtracts the KL of the prompt's other samples from each token's KL."""
        return self.in_loss and self.baseline != "none" and self.placement != "loss" and self.reward_path == "surrogate"

    def __post_init__(self) -> None:
        if self.coef is not None:
            _require(
                self.coef > 0, "mismatch.kl.coef", self.coef, "a number > 0, or leave it out to take the host's own"
            )
        self._check_preset()
        if self.placement is None and self.preset is None:
            object.__setattr__(self, "placement", {"k1": "reward", "k2": "loss"}.get(self.estimator, "both"))
        if self.reward_path == "rewards" and self.placement == "loss":
            raise ConfigError(
                f"mismatch.kl.reward_path='rewards' with placement='loss' (estimator={self.estimator!r}): nothing of it "
                "is a reward; leave out reward_path, or set placement to 'reward' or 'both'."
            )
        if self.target == "token" and self.reward_path == "rewards" and self.placement != "loss":
            raise ConfigError(
                "mismatch.kl.reward_path='rewards' with target='token': a reward is credited to all earlier tokens as "
                "well; use reward_path='surrogate', or target='sequence'."
            )

    def _check_preset(self) -> None:
        if self.preset is not None:
            for f in dataclasses.fields(self):
                if f.name not in ("preset", "coef") and getattr(self, f.name) != f.default:
                    raise ConfigError(
                        f"mismatch.kl.{f.name}: {getattr(self, f.name)!r} together with preset={self.preset!r}, which "
                        "leaves the KL term to the host; leave out one of the two."
                    )
