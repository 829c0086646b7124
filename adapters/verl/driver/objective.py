"""The driver's share of the KL: coefficient of each batch, and the penalty among verl's rewards."""

from __future__ import annotations

from typing import Any

from mismatch_ext.adapters.verl.config import coefficient
from mismatch_ext.adapters.verl.loss import COEF
from mismatch_ext.patches.verl.advantage import KL_IN_REWARDS
from omegaconf import DictConfig

from mismatch_ext.config import KlConfig
from mismatch_ext.errors import PatchError
from mismatch_ext.kl import KlTerm, kl_terms
from mismatch_ext.names import PREFIX
from mismatch_ext.patching import Patch, apply
from mismatch_ext.sums import Sums


class DriverKl:
    """The KL of a run in verl's driver; while it lives, verl's own penalty among the rewards is this one."""

    def __init__(self, section: KlConfig, config: DictConfig) -> None:
        self.term = KlTerm(section, coefficient(section, config))
        self._config = config
        self._penalized = False  # whether the rewards of the present batch were penalized
        self.patches: tuple[Patch, ...] = (KL_IN_REWARDS.calling(self._penalize),) if section.in_rewards else ()
        apply(*self.patches)

    def prepare(self, sums: Sums, step: int) -> dict[str, float]:
        """Fix the coefficient of a batch before its advantages, by `kl_sums` of it, and return what to log."""
        # While the critic alone is updated, the policy stands still, whatever its coefficient.
        learns = int(self._config.trainer.critic_warmup) <= step
        self.term.begin()
        measured = self.term.add(sums) if learns else self.term.measured(sums)
        self.term.update()
        self._penalized = False
        return {PREFIX + name: value for name, value in measured.items()}

    def check_penalized(self) -> None:
        """Raise PatchError if verl has computed advantages without the penalty that the section puts into rewards."""
        if self.term.config.in_rewards and not self._penalized:
            raise PatchError(
                "mismatch.kl.reward_path='rewards': verl computed advantages without its apply_kl_penalty, where the penalty is "
                "added. Use reward_path='surrogate'."
            )

    def send(self, batch: Any) -> None:
        """Send the coefficient of a batch along with it to the workers."""
        batch.extra_info[COEF] = self.term.coef

    def _penalize(self, data: Any) -> dict[str, float]:
        """Take the penalty off the scores of verl's DataProto, and return verl's own two metrics of it."""
        self._penalized = True
        term, batch, mask = self.term, data.batch, data.batch["response_mask"].bool()
        penalty = kl_terms(
            logprobs=batch["old_log_probs"],
            ref_logprobs=batch["ref_log_prob"],
            mask=mask,
            settings=term.config,
            coef=term.coef,
        ).reward
        batch["token_level_rewards"] = batch["token_level_scores"] - penalty.to(batch["token_level_scores"].dtype)
        per_response = penalty.sum(-1) / term.coef / mask.sum(-1).clamp(min=1)
        responses = max(int(mask.any(-1).sum()), 1)
        return {
            "actor/reward_kl_penalty": float(per_response.sum()) / responses,
            "actor/reward_kl_penalty_coeff": term.coef,
        }
