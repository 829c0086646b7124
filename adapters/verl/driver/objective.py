"""The driver's share of the objective: KL among the rewards, and the KL's coefficient and baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mismatch_ext.adapters.verl.measure import measure_kl
from mismatch_ext.adapters.verl.settings.kl import coefficient
from mismatch_ext.adapters.verl.worker.kl import COEF
from mismatch_ext.patches.verl.advantage import KL_IN_REWARDS

from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import PatchError
from mismatch_ext.kl import KlTerm, kl_terms
from mismatch_ext.names import PREFIX
from mismatch_ext.patching import Patch, apply

if TYPE_CHECKING:
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer as _Host
else:
    _Host = object


class ObjectiveMixin(_Host):
    """Overrides what verl's trainer computes between old log-probabilities and the update."""

    _block: MismatchConfig
    _kl: KlTerm | None = None
    _patches: tuple[Patch, ...] = ()
    _penalized = 0  # batches whose rewards were penalized

    def _begin_objective(self) -> None:
        """Put the block's penalty where verl calls its own by name, for as long as this trainer lives."""
        kl = self._block.kl
        if kl is not None:
            self._kl = KlTerm(kl, coefficient(kl, self.config))
            if kl.in_rewards:
                self._patches = (KL_IN_REWARDS.calling(self._penalise),)
        apply(*self._patches)

    def _penalise(self, data: Any) -> dict[str, float]:
        assert self._kl is not None
        self._penalized += 1
        return apply_kl_to_rewards(data, self._kl)

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Compute advantages as verl does, after the coefficient and the baseline of this batch are fixed.

        Raises:
            PatchError: verl did not ask for the penalty among the rewards.
        """
        if self._kl is not None:
            sums = measure_kl(batch, self._kl.config)
            # While the critic alone is updated, the policy stands still, whatever its coefficient.
            learns = int(self.config.trainer.critic_warmup) <= self.global_steps
            self._kl.begin()
            measured = self._kl.add(sums) if learns else self._kl.measured(sums)
            self._kl.update()
            metrics.update({PREFIX + name: value for name, value in measured.items()})
        before = self._penalized
        advantages = super()._compute_advantage(batch, metrics)
        if self._kl is not None and self._kl.config.in_rewards and self._penalized == before:
            raise PatchError(
                "mismatch.kl.reward_path='rewards': verl computed advantages without its apply_kl_penalty, where the penalty is "
                "added. Use reward_path='surrogate'."
            )
        return advantages

    def _carry_coefficient(self, batch: Any) -> None:
        """Send the coefficient of this batch along with it to the workers."""
        if self._kl is not None:
            batch.extra_info[COEF] = self._kl.coef


def apply_kl_to_rewards(data: Any, term: KlTerm) -> dict[str, float]:
    """Take the KL penalty off verl's token-level scores, instead of verl's `apply_kl_penalty`.

    Args:
        data: verl's DataProto with `token_level_scores`, `old_log_probs`, `ref_log_prob` and `response_mask` before rejection;
            `token_level_rewards` is set.
        term: The run's.

    Returns:
        verl's own two metrics: the mean over responses of the mean estimate per token, nats, and the coefficient.
    """
    batch, mask = data.batch, data.batch["response_mask"].bool()
    penalty = kl_terms(batch["old_log_probs"], batch["ref_log_prob"], mask, term.config, coef=term.coef).reward
    batch["token_level_rewards"] = batch["token_level_scores"] - penalty.to(batch["token_level_scores"].dtype)
    per_response = penalty.sum(-1) / term.coef / mask.sum(-1).clamp(min=1)
    responses = max(int(mask.any(-1).sum()), 1)
    return {
        "actor/reward_kl_penalty": float(per_response.sum()) / responses,
        "actor/reward_kl_penalty_coeff": term.coef,
    }
