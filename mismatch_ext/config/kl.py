"""The `kl` section: regularisation towards the reference policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mismatch_ext.errors import ConfigError
from mismatch_ext.strict import require as _require
from mismatch_ext.strict import settle


@dataclass(frozen=True, kw_only=True)
class KlConfig:
    """KL regularisation towards the reference policy, with the gradient that it claims (arXiv 2512.21852).

    To keep the host's own KL term, leave the section out. In TRL its `beta` and `use_bias_correction_kl` then have their effect;
    with the section, `ratio` takes the place of the latter.
    """

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
    target_kl: float | None = None
    """Wanted KL divergence from the reference, nats per token: the coefficient starts at `coef` and follows it. None keeps the
    coefficient constant."""

    @property
    def in_rewards(self) -> bool:
        """Whether a part of the KL enters the host's rewards, before they become advantages."""
        return self.placement != "loss" and self.reward_path == "rewards"

    @property
    def in_loss(self) -> bool:
        """Whether a part of the KL is a term of this package in the host's loss."""
        return not (self.placement == "reward" and self.reward_path == "rewards")

    @property
    def has_baseline(self) -> bool:
        """Whether the term in the loss subtracts the KL of the prompt's other samples from each token's KL."""
        return self.in_loss and self.baseline != "none" and self.placement != "loss" and self.reward_path == "surrogate"

    def __post_init__(self) -> None:
        settle(self, "mismatch.kl")
        if self.coef is not None:
            _require(
                self.coef > 0, "mismatch.kl.coef", self.coef, "a number > 0, or leave it out to take the host's own"
            )
        if self.target_kl is not None:
            _require(self.target_kl > 0, "mismatch.kl.target_kl", self.target_kl, "a number > 0")
        if self.placement is None:
            object.__setattr__(self, "placement", {"k1": "reward", "k2": "loss"}.get(self.estimator, "both"))
        if self.reward_path == "rewards" and self.placement == "loss":
            raise ConfigError(
                f"mismatch.kl.reward_path='rewards' with placement='loss' (estimator={self.estimator!r}): nothing of it "
                "is a reward; leave out reward_path, or set placement to 'reward' or 'both'."
            )
        if self.in_rewards:
            self._check_rewards()
        if self.estimator == "full" and self.placement == "reward" and self.target == "token":
            raise ConfigError(
                "mismatch.kl.estimator='full' with placement='reward' and target='token': this term has no gradient, because a "
                "token's exact KL has no score-function part; set placement to 'loss', or target to 'sequence'."
            )

    def _check_rewards(self) -> None:
        for name, wrong, why in (
            ("target", self.target == "token", "a reward is credited to all earlier tokens as well"),
            ("ratio", self.ratio != "none", "a reward is weighed with the policy term that it is part of"),
            (
                "estimator",
                self.estimator == "full",
                "the vocabulary's log-probabilities are not kept from sampling time",
            ),
        ):
            if wrong:
                raise ConfigError(
                    f"mismatch.kl.reward_path='rewards' with {name}={getattr(self, name)!r}: {why}; use "
                    f"reward_path='surrogate', or another {name}."
                )
