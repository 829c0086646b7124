"""What the block changes in TRL's objective: the KL term, and the policy term of `correction.mode: bypass`.

TRL's `_compute_loss` runs as it is, with its own KL term switched off; what is added is weighted token by token as TRL weights
its own per-token loss (`aggregation.token_weights`), so that denominators are TRL's for every `loss_type`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from mismatch_ext.adapters.transformers.logits import completion_logits
from mismatch_ext.adapters.trl.aggregation import overridden, token_weights
from mismatch_ext.adapters.trl.correction import CorrectionTerm
from mismatch_ext.adapters.trl.kl import KlTerm
from mismatch_ext.adapters.trl.routing import RoutingMixin
from torch import Tensor
from trl.trainer.utils import use_adapter

from mismatch_ext.errors import ConfigError

Scores = tuple[Tensor, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class Scored:
    """A scoring pass of TRL: what it was called with, and what came out."""

    model: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    scores: Scores


class ObjectiveMixin(RoutingMixin):
    """Overrides the methods of GRPOTrainer that make its loss; `MismatchTrainerMixin` sets what is active."""

    _kl: KlTerm | None = None
    _correction: CorrectionTerm | None = None
    _given_scores: Scores | None = None
    _scored: list[Scored]

    @property
    def _reinforces(self) -> bool:
        return self._correction is not None and self._correction.reinforces

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Scores:
        """Score tokens as TRL does, and keep the result for the terms that are added to loss or rewards."""
        if self._given_scores is not None:
            return self._given_scores
        scores = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        if self._kl is not None or self._reinforces:
            self._scored.append(Scored(model, args, kwargs, scores))
        return scores

    def _set_kl_rewards(self, completion_ids: Sequence[Sequence[int]]) -> None:
        """Compute the KL penalty of each fresh completion: TRL has just scored them under the reference, its last pass."""
        assert self._kl is not None
        reference = self._scored[-1]
        if len(self._scored) > 1:
            old = self._scored[-2].scores[0]
        else:
            with torch.no_grad(), torch.random.fork_rng():
                old = super()._get_per_token_logps_and_entropies(self.model, *reference.arguments, **reference.options)[
                    0
                ]
        lengths = torch.tensor([len(ids) for ids in completion_ids], device=old.device)
        mask = torch.arange(old.size(1), device=old.device) < lengths[:, None]
        self._kl.set_rewards(old, reference.scores[0], mask)

    def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
        """Compute TRL's loss, with the block's terms in the place of TRL's own."""
        if self._kl is None and not self._reinforces:
            return super()._compute_loss(model, inputs)
        self._scored = []
        advantages = inputs["advantages"]
        given = {**inputs, "advantages": torch.zeros_like(advantages)} if self._reinforces else inputs
        with overridden(self, beta=0.0 if self._kl is not None else self.beta):
            loss = super()._compute_loss(model, given)
        logps, entropies, _ = self._scored[-1].scores
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        term = torch.zeros_like(logps)
        if self._kl is not None:
            term = term + self._kl.loss(logps, inputs, mask, lambda: self._both_logits(model, inputs), self.temperature)
            self._log_kl(logps.detach(), inputs["ref_per_token_logps"], mask)
        if self._correction is not None and self._reinforces:
            advantages = advantages if advantages.dim() == 2 else advantages[:, None]
            term = term - self._correction.policy_weights(logps.detach(), inputs, mask) * advantages * logps

        def aggregate(probe: Mapping[str, Any], given_logps: Tensor) -> Tensor:
            with overridden(self, _given_scores=(given_logps, entropies, None)):
                return super(ObjectiveMixin, self)._compute_loss(model, probe)

        self._scored = []
        # Masked tokens have weight 0, and their term is finite.
        return loss + (token_weights(self, aggregate, inputs) * term).sum()

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

    def _log_kl(self, logps: Tensor, reference_logps: Tensor, mask: Tensor) -> None:
        """Log `kl` under TRL's own name: the mean k3 per token over all ranks, without a ratio."""
        assert self._kl is not None
        mode = "train" if self.model.training else "eval"
        found = self._kl.measure(logps, reference_logps, mask, self.accelerator.reduce)
        for name in ("kl", "mismatch/kl_ref_k1", "mismatch/kl_coef"):
            self._metrics[mode][name].append(found[name])
