"""What the block changes in TRL's objective: the KL term, and the policy term of `correction.mode: bypass`.

TRL's `_compute_loss` runs with its own KL term switched off; what is added is weighted token by token as TRL weights its own
per-token loss (`aggregation.py`). The terms stand where this package's class stands among the bases of a trainer: outside of a
user's `_compute_loss` if it is first, inside if it is last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from mismatch_ext.adapters.trl.aggregation import mask_of_loss, token_weights
from mismatch_ext.adapters.trl.correction import native_options
from mismatch_ext.adapters.trl.kl import BASELINE, batch_baseline, kl_loss
from mismatch_ext.adapters.trl.passes import RolloutPass, Scored
from mismatch_ext.adapters.trl.rows import rows_of_batch
from torch import Tensor
from trl import GRPOTrainer

from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import ConfigError
from mismatch_ext.kl import KlTerm, kl_sums, kl_terms
from mismatch_ext.names import PREFIX
from mismatch_ext.presets import resolve
from mismatch_ext.ranks import together
from mismatch_ext.rng import forked_rng
from mismatch_ext.sums import over_ranks

if TYPE_CHECKING:
    from mismatch_ext.adapters.trl.host import Gap
    from mismatch_ext.adapters.trl.run import TrlRun

Loss = Callable[..., Tensor]

WEIGHTS = "importance_sampling_ratio"
"""TRL's key of the weights that it multiplies its per-token loss by."""


def sections_in_loss(block: MismatchConfig) -> tuple[str, ...]:
    """Return the sections of a block that have no effect unless TRL's own loss is stepped."""
    found = []
    if block.kl is not None and block.kl.in_loss:
        found.append("mismatch.kl")
    if block.correction is not None:
        settings = resolve(block.correction)
        stays_stock = native_options(settings) in ({}, {"vllm_importance_sampling_correction": False})
        changes_weights = not stays_stock or settings.off_policy_threshold is not None
        is_centered = settings.centering is not None and not settings.centering.only_measured
        if changes_weights or is_centered:
            found.append("mismatch.correction")
    return tuple(found)


class Objective:
    """The block's terms in the loss and in the rewards of one trainer."""

    def __init__(self, run: TrlRun) -> None:
        self.run, self.trainer = run, run.trainer
        self.sections = sections_in_loss(run.block)
        self.losses = 0  # that came through `loss` since the last step
        self._kl_step: int | None = None  # step whose batches the controller has begun to measure

    def begin_batch(self) -> None:
        """Begin a batch with TRL's present coefficient, or with the controller's, which all batches of a step move once."""
        term = self.run.kl
        if term is None:
            return
        term.follow(self.trainer.beta)
        if self.trainer.model.training and self._kl_step != self.run.step:
            self._kl_step = self.run.step
            term.begin()

    def begin_anew(self) -> None:
        """Forget an earlier training."""
        self._kl_step, self.losses = None, 0

    def penalties(self, completion_ids: Sequence[Sequence[int]]) -> list[float]:
        """Return the KL penalty of each fresh completion, from TRL's passes over its tokens."""
        term, batch, trainer = self.run.kl, self.run.rollouts, self.trainer
        assert term is not None and batch is not None
        if term.coef == 0:
            return [0.0] * len(completion_ids)
        prompts = batch.prompts

        def is_of(scored: Scored) -> bool:
            return scored.is_of_rows(prompts, completion_ids)

        reference = batch.first_pass(is_of, reference=True)
        if reference is None:
            raise ConfigError(
                f"mismatch.kl.reward_path='rewards' with {type(trainer).__name__}: no pass of the reference is of the prompts "
                "and completions that are rewarded; something changes them after they are generated. Use "
                "reward_path='surrogate'."
            )
        policy = batch.first_pass(lambda scored: scored.model is trainer.model and is_of(scored))
        if policy is None:
            with torch.no_grad(), forked_rng(reference.tokens.device):
                old = trainer._get_per_token_logps_and_entropies(
                    trainer.model, reference.tokens, reference.attention_mask, reference.length, **reference.options
                )[0]
        else:
            old = policy.scores[0]
        lengths = torch.tensor([len(ids) for ids in completion_ids], device=old.device)
        mask = torch.arange(old.size(1), device=old.device) < lengths[:, None]
        # A row that is not finite has no such reward, and becomes a bad row once the batch is scored.
        finite = ((old.isfinite() & reference.scores[0].isfinite()) | ~mask).all(1)
        terms = kl_terms(
            logprobs=old,
            ref_logprobs=reference.scores[0],
            mask=mask & finite[:, None],
            settings=term.config,
            coef=term.coef,
        )
        penalties: list[float] = terms.reward.sum(-1).masked_fill(~finite, torch.nan).tolist()
        return penalties

    def give_baseline(self, output: dict[str, Any], mask: Tensor, batch: RolloutPass, gap: Gap | None) -> None:
        """Give the rows of a batch their baseline, and its KL to the controller."""
        term, run = self.run.kl, self.run
        if term is None or not term.coef:
            return
        adapts, needed = term.adaptive and self.trainer.model.training, term.config.has_baseline
        if not (adapts or needed):
            return
        old = run.old_logprobs(output) if gap is None else gap[0]
        if needed:
            pad = self.trainer._tokenizer.pad_token_id
            output[BASELINE] = batch_baseline(term, output, old, mask, batch.generated, pad, run.ranks)
        if adapts:
            with together(run.ranks):
                sums = kl_sums(logprobs=old, ref_logprobs=output["ref_per_token_logps"], mask=mask)
            term.add(over_ranks(sums, run.ranks))

    # The loss.

    def loss(self, host: Loss, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the loss as `_compute_loss` of the class after ours does, with the block's terms instead of TRL's."""
        self.losses += torch.is_grad_enabled()
        kl, correction = self.run.kl, self.run.correction
        if kl is not None and not kl.config.in_rewards:
            # A batch may last for several steps, and TRL's own term has the coefficient of each.
            kl.follow(self.trainer.beta)
        if kl is not None and kl.coef == 0:
            kl = None
        reinforces = correction is not None and correction.reinforces
        if kl is None and not reinforces:
            return self._weighed(host, model, inputs, *args, **kwargs)
        given = inputs
        if reinforces:
            self._expect_trls_advantages(host)
            given = {**inputs, "advantages": torch.zeros_like(inputs["advantages"])}
        beta = self.trainer.beta
        if kl is not None:
            self.trainer.beta = 0.0  # TRL's own term is off while the block's stands in its place
        try:
            loss = self._weighed(host, model, given, *args, **kwargs)
        finally:
            if kl is not None and self.trainer.beta == 0.0:  # otherwise a user's loss has set another
                self.trainer.beta = beta
        if kl is not None and not kl.config.in_loss and not reinforces:
            self._log_kl_of_rewards(kl, model, inputs)
            return loss
        logps, mask = self._scored_logps(model, inputs), mask_of_loss(inputs)
        if not bool((logps.isfinite() | ~mask.bool()).all()):
            # Another rank may be finite and would wait for this one. The gradient is that of all ranks: their scaler skips the
            # step, or all of them end before it.
            if kl is not None:
                self._log_kl(kl, logps.detach(), inputs, torch.zeros_like(mask))
            return loss + (logps * torch.nan).sum()
        term = torch.zeros_like(logps)
        if kl is not None:
            term = term + kl_loss(kl, logps, inputs, mask)
            self._log_kl(kl, logps.detach(), inputs, self._good_tokens(inputs))
        if reinforces:
            assert correction is not None
            advantages = inputs["advantages"]
            advantages = advantages if advantages.dim() == 2 else advantages[:, None]
            term = term - correction.policy_weights(logps.detach(), inputs, mask) * advantages * logps
        # Masked tokens have weight 0, and their term is finite.
        return loss + (token_weights(self.trainer, inputs) * term).sum()

    def _expect_trls_advantages(self, host: Loss) -> None:
        if _is_users(host):
            assert self.run.correction is not None
            loss = self.run.correction.settings.loss
            raise ConfigError(
                f"mismatch.correction.loss={loss!r} with {type(self.trainer).__name__}, whose _compute_loss runs inside of "
                "ours and would be given advantages of 0. Put its class first: class T(Yours, MismatchGRPOTrainer)."
            )

    def _good_tokens(self, inputs: Mapping[str, Any]) -> Tensor:
        return mask_of_loss(inputs).masked_fill(self.run.scoring.are_bad(inputs)[:, None], 0)

    def _log_kl_of_rewards(self, kl: KlTerm, model: Any, inputs: Mapping[str, Any]) -> None:
        """Log the KL of a loss that it is no term of; such a loss may be of parts of the micro-batch, which are not logged."""
        reference, good = inputs["ref_per_token_logps"], self._good_tokens(inputs)
        known = [logps for logps in self._found_logps(model, inputs) if logps.shape == reference.shape]
        measured = (known or [reference])[0]
        if not known or not bool((measured.isfinite() | ~good.bool()).all()):
            good = torch.zeros_like(good)
        self._log_kl(kl, measured, inputs, good)

    def _found_logps(self, model: Any, inputs: Any) -> list[Tensor]:
        """Return the log-probabilities of the policy's passes over a micro-batch while its loss is computed."""
        rows, passes = rows_of_batch(inputs), self.run.scoring.passes or ()
        return [scored.scores[0] for scored in passes if scored.model is model and scored.is_of(*rows)]

    def _scored_logps(self, model: Any, inputs: Any) -> Tensor:
        """Return the log-probabilities `[B, T]` that TRL's loss has got for its micro-batch, with their graph."""
        shape, found = inputs["completion_ids"].shape, self._found_logps(model, inputs)
        if not found or found[0].shape != shape:
            raise ConfigError(
                f"mismatch.kl and mismatch.correction with {type(self.trainer).__name__}: TRL's loss got no log-probability of "
                f"each token of its micro-batch {list(shape)} from _get_per_token_logps_and_entropies. Remove what overrides it; "
                "if your _compute_loss gives TRL's other rows, put its class first: class T(Yours, MismatchGRPOTrainer)."
            )
        # A user may also have scored the same tokens for something that is only logged.
        return next((logps for logps in found if logps.requires_grad), found[0])

    def _weighed(self, host: Loss, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Compute a user's loss, and refuse one that does not depend on the correction's weights, as TRL's own does."""
        if "mismatch.correction" not in self.sections or not torch.is_grad_enabled() or not _is_users(host):
            return host(model, inputs, *args, **kwargs)
        if WEIGHTS not in inputs:
            raise self.refusal("whether TRL's own off-policy mask is in the loss cannot be seen from outside of it")
        weights = inputs[WEIGHTS]
        inputs[WEIGHTS] = leaf = weights.detach().requires_grad_()
        try:
            loss = host(model, inputs, *args, **kwargs)
        finally:
            inputs[WEIGHTS] = weights
        slope = None
        if loss.requires_grad:
            (slope,) = torch.autograd.grad(loss.sum(), leaf, retain_graph=True, allow_unused=True)
        if slope is None:
            raise self.refusal(
                "the loss does not depend on the weights that TRL's own GRPOTrainer._compute_loss multiplies by"
            )
        return loss

    def _log_kl(self, term: KlTerm, logps: Tensor, inputs: Mapping[str, Any], mask: Tensor) -> None:
        """Log the KL of all ranks' tokens, without a ratio; its k3 also as `kl`, TRL's own name for it."""
        metrics = self.trainer._metrics[self.run.mode]
        sums = over_ranks(
            kl_sums(logprobs=logps, ref_logprobs=inputs["ref_per_token_logps"], mask=mask), self.run.ranks
        )
        if not float(sums["kl_tokens"]):
            return
        found = term.measured(sums)
        for name, value in {"kl": found["kl_ref_k3"], **{PREFIX + n: v for n, v in found.items()}}.items():
            metrics[name].append(value)

    # That the loss which is stepped is this one.

    def expect_losses(self) -> None:
        """Refuse an optimizer step if the loss of a micro-batch did not come through `loss`: a subclass may make its own."""
        losses, self.losses = self.losses, 0
        if losses < self.trainer.current_gradient_accumulation_steps:
            if self.sections:
                raise self.refusal("the loss of a micro-batch was computed without TRL's own GRPOTrainer._compute_loss")
            if self.run.scoring.sections:
                raise self.run.scoring.refusal()

    def refusal(self, what: str) -> ConfigError:
        """Return the error for a loss in which the block's terms do not stand."""
        sections = " and ".join(self.sections)
        return ConfigError(
            f"{sections} with {type(self.trainer).__name__}: {what}, and would be off in silence. Return a loss that "
            f"super()._compute_loss(model, inputs) is a part of, in a class that is first, class T(Yours, "
            f"MismatchGRPOTrainer); or remove {sections}."
        )


def _is_users(host: Loss) -> bool:
    """Tell whether a loss is a user's, between TRL's and ours."""
    return getattr(host, "__func__", host) is not GRPOTrainer._compute_loss
