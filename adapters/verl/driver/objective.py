"""The driver's share of the objective: KL among the rewards, and the KL's coefficient and baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mismatch_ext.adapters.verl.driver.kl import apply_kl_to_rewards, groups
from mismatch_ext.adapters.verl.settings.kl import coefficient
from mismatch_ext.adapters.verl.worker.kl import COEF
from mismatch_ext.adapters.verl.worker.spread import shares
from mismatch_ext.patches.verl.advantage import KL_IN_REWARDS

from mismatch_ext.config import KlConfig, MismatchConfig
from mismatch_ext.errors import PatchError
from mismatch_ext.kl import KlTerm
from mismatch_ext.names import PREFIX
from mismatch_ext.patching import Patch, apply
from mismatch_ext.sums import Sums, merged

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
            sums = self._kl_sums(batch, self._kl.config)
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

    def _kl_sums(self, batch: Any, section: KlConfig) -> Sums:
        """Let the workers sum up the KL of a batch, and put its leave-one-out baseline where their loss finds it."""
        ranks = self.actor_rollout_wg.world_size
        parts = shares(groups(batch.keys), ranks)
        return merged(*self.actor_rollout_wg.mismatch_kl(parts, [batch.partition_id] * ranks, [section] * ranks))

    def _carry_coefficient(self, batch: Any) -> None:
        """Send the coefficient of this batch along with it to the workers."""
        if self._kl is not None:
            batch.extra_info[COEF] = self._kl.coef
