"""What the block changes in TRL's objective: the KL term, and the policy term of `correction.mode: bypass`.

TRL's own `_compute_loss` runs as it is, with its own KL term switched off; what is added is weighted token by token as TRL
weights its own per-token loss (`aggregation.read_aggregation`), so that denominators are TRL's for every `loss_type`. It is added
where TRL's KL term stands, inside that function, so that what a subclass does to TRL's loss, it does to the added terms too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from mismatch_ext.adapters.transformers.logits import completion_logits
from mismatch_ext.adapters.trl.aggregation import OwnLoss, read_aggregation
from mismatch_ext.adapters.trl.arrival import ArrivalMixin
from mismatch_ext.adapters.trl.correction import CorrectionTerm
from mismatch_ext.adapters.trl.kl import BASELINE, KlReward, kl_loss, needs_baseline
from mismatch_ext.adapters.trl.overridden import overridden
from mismatch_ext.adapters.trl.passes import Scored, watched_loss
from torch import Tensor
from trl.trainer.utils import use_adapter

from mismatch_ext.errors import ConfigError
from mismatch_ext.kl import KlTerm, kl_sums, kl_terms
from mismatch_ext.names import PREFIX
from mismatch_ext.ranks import Ranks
from mismatch_ext.rng import forked_rng
from mismatch_ext.sums import over_ranks


class ObjectiveMixin(ArrivalMixin):
    """Adds the block's terms to TRL's own loss; `MismatchTrainerMixin` sets what is active."""

    _kl: KlTerm | None = None
    # It is among TRL's reward functions if a part of the KL is in the rewards.
    _kl_reward: KlReward | None = None
    _ranks: Ranks
    _correction: CorrectionTerm | None = None

    # Step whose batches the controller has begun to measure.
    _kl_step: int | None = None

    def _begin_kl(self, term: KlTerm) -> None:
        """Begin a batch with TRL's present coefficient, or with the controller's, which all batches of a step move once."""
        term.follow(self.beta)
        if self.model.training and self._kl_step != self.state.global_step:
            self._kl_step = self.state.global_step
            term.begin()

    @property
    def _reinforces(self) -> bool:
        return self._correction is not None and self._correction.reinforces

    def _kl_penalties(self, completion_ids: Sequence[Sequence[int]]) -> list[float]:
        """Return the KL penalty of each fresh completion, from TRL's passes over its tokens.

        Raises:
            ConfigError: The reference was not scored on the completions that get a reward.
        """
        assert self._kl is not None and self._rollout_pass is not None
        if self._kl.coef == 0:
            return [0.0] * len(completion_ids)
        batch, prompts = self._rollout_pass, self._rollout_pass.prompts

        def is_of(scored: Scored) -> bool:
            return scored.is_of_rows(prompts, completion_ids)

        reference = batch.of_reference(is_of)
        if reference is None:
            raise ConfigError(
                f"mismatch.kl.reward_path='rewards' with {type(self).__name__}: no pass of the reference is of the prompts and "
                "completions that are rewarded; something changes them after they are generated. Use reward_path='surrogate'."
            )
        policy = batch.of_policy(self.model, is_of)
        if policy is None:
            with torch.no_grad(), forked_rng(reference.tokens.device):
                old = self._get_per_token_logps_and_entropies(
                    self.model, reference.tokens, reference.attention_mask, reference.length, **reference.options
                )[0]
        else:
            old = policy.scores[0]
        lengths = torch.tensor([len(ids) for ids in completion_ids], device=old.device)
        mask = torch.arange(old.size(1), device=old.device) < lengths[:, None]
        terms = kl_terms(old, reference.scores[0], mask, self._kl.config, coef=self._kl.coef)
        penalties: list[float] = terms.reward.sum(-1).tolist()
        return penalties

    def _with_terms(self, own_loss: OwnLoss, model: Any, inputs: Any) -> Tensor:
        """Compute TRL's own loss, with the block's terms instead of TRL's."""
        self._check_own(own_loss)
        kl = self._kl
        if kl is not None and not kl.config.in_rewards:
            kl.follow(self.beta)  # a batch may last for several steps, and TRL's own term has the coefficient of each
        if kl is not None and kl.coef == 0:
            kl = None
        if kl is None and not self._reinforces:
            return own_loss(self, model, inputs)
        if kl is not None and needs_baseline(kl) and BASELINE not in inputs:
            raise ConfigError(
                f"mismatch.kl: the micro-batch has no {BASELINE!r}; something between _generate_and_score_completions and "
                "TRL's _compute_loss dropped it. Pass it on, row by row, with the other inputs."
            )
        advantages = inputs["advantages"]
        given = {**inputs, "advantages": torch.zeros_like(advantages)} if self._reinforces else inputs
        beta = 0.0 if kl is not None else self.beta
        with watched_loss(self, model, inputs) as passes, overridden(self, beta=beta):
            loss = own_loss(self, model, given)
        logps = passes[0].scores[0]
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        term = torch.zeros_like(logps)
        if kl is not None:
            both = lambda: self._both_logits(model, inputs)  # noqa: E731
            term = term + kl_loss(kl, logps, inputs, mask, both, self.temperature)
            self._log_kl(kl, logps.detach(), inputs["ref_per_token_logps"], mask)
        if self._correction is not None and self._reinforces:
            advantages = advantages if advantages.dim() == 2 else advantages[:, None]
            term = term - self._correction.policy_weights(logps.detach(), inputs, mask) * advantages * logps
        aggregation = read_aggregation(self, own_loss, model, inputs)
        # Masked tokens have weight 0, and their term is finite.
        added = (aggregation.weights * term).sum()
        if aggregation.policy_loss is not None:
            # TRL's own metric includes the KL term, not yet divided for gradient accumulation, as a mean over ranks.
            mode = "train" if self.model.training else "eval"
            mine = self.accelerator.gather(added.detach() * aggregation.policy_loss).nanmean().item()
            self._metrics[mode]["policy_loss"][-1] += mine
        return loss + added

    def _both_logits(self, model: Any, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Return the policy's and the reference's logits `[B, T, V]`, before they are divided by the temperature."""
        if any(key in inputs for key in ("pixel_values", "image_grid_thw", "token_type_ids", "mm_token_type_ids")):
            raise ConfigError(
                "mismatch.kl.estimator='full' with multimodal inputs: the logits would be those of a model that sees none "
                "of them; use another estimator."
            )
        tokens = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention_mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        length = inputs["completion_ids"].size(1)
        with self.accelerator.autocast():
            policy = self._logits(model, tokens, attention_mask, length)
            with torch.no_grad():
                if self.ref_model is not None:
                    reference = self._logits(self.ref_model, tokens, attention_mask, length)
                else:
                    peft_model = self.accelerator.unwrap_model(self.model)
                    with use_adapter(peft_model, adapter_name="ref" if "ref" in peft_model.peft_config else None):
                        reference = self._logits(self.model, tokens, attention_mask, length)
        return policy, reference

    def _logits(self, model: Any, tokens: Tensor, attention_mask: Tensor, length: int) -> Tensor:
        with self._routed(model, attention_mask, length):
            return completion_logits(model, tokens, attention_mask, length)

    def _log_kl(self, term: KlTerm, logps: Tensor, reference_logps: Tensor, mask: Tensor) -> None:
        """Log the KL of all ranks' tokens, without a ratio; its k3 also as `kl`, TRL's own name for it."""
        metrics = self._metrics["train" if self.model.training else "eval"]
        found = term.measured(over_ranks(kl_sums(logps, reference_logps, mask), self._ranks))
        for name, value in {"kl": found["kl_ref_k3"], **{PREFIX + n: v for n, v in found.items()}}.items():
            metrics[name].append(value)
