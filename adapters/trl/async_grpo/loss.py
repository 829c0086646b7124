"""The gap of each trained token and the weights that correct it, between TRL's forward pass and its loss.

TRL's `compute_loss` runs the model, and makes the loss from the model's answer. It is called twice here. The first call stops at
the model, and shows which arguments the model gets; the second is given the model's answer, and inputs that hold the weights.
The model itself runs once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from mismatch_ext.adapters.trl.async_grpo.replay import TreeReplay
from mismatch_ext.adapters.trl.async_grpo.rows import ENDED, ROUTED, ROUTES, VERSIONS
from mismatch_ext.adapters.trl.host import TrainerRun
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from mismatch_ext.config import MismatchConfig
from mismatch_ext.correction import correct, metrics_over_ranks
from mismatch_ext.drift import UNKNOWN, drift_sums
from mismatch_ext.errors import ConfigError
from mismatch_ext.names import PREFIX
from mismatch_ext.presets import ResolvedCorrection
from mismatch_ext.rng import forked_rng
from mismatch_ext.sums import Sums, merged

INDEX, OLD, ADVANTAGES, SEGMENTS = "token_index", "old_log_probs", "advantages", "segment_id"


class _Reached(Exception):
    """TRL's loss has come to the model."""


class Asked:
    """Stands in for the model, and notes the arguments that it is called with."""

    def __init__(self) -> None:
        self.kwargs: dict[str, Any] | None = None

    def __call__(self, **kwargs: Any) -> NoReturn:
        """Note the arguments, and go no further."""
        self.kwargs = kwargs
        raise _Reached


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The trained tokens of this rank's row, a line for each rollout `[B, T]`.

    Args:
        logprobs: The trainer's log-probabilities, without a graph.
        rollout: The engine's log-probabilities.
        mask: True at tokens.
        versions: Versions of the weights that sampled the tokens.
        advantages: As TRL has them.
    """

    logprobs: Tensor
    rollout: Tensor
    mask: Tensor
    versions: Tensor
    advantages: Tensor

    @classmethod
    def of(cls, logprobs: Tensor, inputs: dict[str, Any]) -> Terms:
        """Lay out in lines what TRL has in one sequence.

        Args:
            logprobs: The trainer's log-probabilities at each position of the row `[N]`.
            inputs: The micro-batch.
        """
        chosen = inputs[INDEX] >= 0
        sizes = torch.bincount(inputs[SEGMENTS][chosen], minlength=int((inputs[ENDED] != UNKNOWN).sum())).tolist()

        def rows(values: Tensor) -> Tensor:
            return pad_sequence(list(values.split(sizes)), batch_first=True)

        flat = logprobs.detach().float()[inputs[INDEX][chosen]]
        return cls(
            logprobs=rows(flat),
            rollout=rows(inputs[OLD][chosen]),
            mask=rows(torch.ones_like(flat, dtype=torch.bool)),
            versions=rows(inputs[VERSIONS][chosen]),
            advantages=rows(inputs[ADVANTAGES][chosen]),
        )


class LossRun(TrainerRun):
    """The part of a run that is between TRL's forward pass and its loss.

    Attributes:
        step_gap: Gap of the rollouts that the next step learns from.
        fresh_gap: Gap of the rollouts that were sampled right after the last weight update.
        step_lengths: Lengths of those that the next step learns from, and whether each was cut.
    """

    routing: TreeReplay | None
    correction: ResolvedCorrection | None = None

    def __init__(self, trainer: Any, block: MismatchConfig, output_dir: str) -> None:
        super().__init__(trainer, block, output_dir)
        self.routing = None
        self.step_gap: Sums | None = None
        self.fresh_gap: Sums | None = None
        self.step_lengths: list[tuple[Tensor, Tensor]] = []

    def loss(
        self,
        plain: Callable[..., Any],
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Compute the loss as TRL does, from a forward pass under recorded routes; the correction weights each token.

        A `compute_loss` between this one and TRL's is entered twice, and left by an exception the first time.

        Raises:
            ConfigError: The loss is computed without the model.
            NonFiniteLogprobError: A log-probability of a trained token is not finite.
        """
        if not self.trainer.model.training:
            return plain(model, inputs, return_outputs, num_items_in_batch)
        kwargs = self.asked(plain, inputs)
        begun = time.time()
        with self.routed(inputs, kwargs):
            outputs = model(**kwargs)
        self.trainer._step_forward_s += time.time() - begun
        terms = Terms.of(outputs.log_probs.flatten(), inputs)
        self._measure(terms, inputs)
        if self.routing is not None and self.routing.draws.native_gap():
            self._measure_native(model, kwargs, inputs, terms)
        if self.correction is not None:
            inputs = self._corrected(terms, inputs)
        return plain(lambda **kwargs: outputs, inputs, return_outputs, num_items_in_batch)

    def asked(self, plain: Callable[..., Any], inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments that TRL's loss calls the model with for a micro-batch.

        Raises:
            ConfigError: TRL's loss does not call the model.
        """
        asked = Asked()
        try:
            plain(asked, inputs)
        except _Reached:
            pass
        if asked.kwargs is None:
            raise ConfigError(
                f"mismatch with {type(self.trainer).__name__}: its loss was computed without calling the model that was "
                "given, so that there is no gap to measure or correct. Let compute_loss call AsyncGRPOTrainer's."
            )
        return asked.kwargs

    def _measure_fresh(self, inputs: dict[str, Any]) -> None:
        """Measure rollouts of the present weights that are not trained on, by the same pass as those that are."""
        kwargs = self.asked(self.trainer.plain_loss, inputs)
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        with torch.no_grad(), forked_rng(self.trainer.accelerator.device), self.autocast(), self.routed(inputs, kwargs):
            outputs = model(**kwargs)
        terms = Terms.of(outputs.log_probs.flatten(), inputs)
        given, step = (terms.logprobs, terms.rollout, terms.mask, terms.versions), self.step
        self.fresh_gap = drift_sums(*given, scoring=step, buffered=True)
        self.log.add_drift(self.fresh_gap)

    def _measure(self, terms: Terms, inputs: dict[str, Any]) -> None:
        """Measure the gap of the trained tokens, those of the present weights apart from those of older ones."""
        given = (terms.logprobs, terms.rollout, terms.mask)
        self.log.observe("train", *given)
        drift = drift_sums(*given, terms.versions, scoring=self.step)
        self.log.add_drift(drift)
        self.step_gap = drift if self.step_gap is None else merged(self.step_gap, drift)
        ended = inputs[ENDED][inputs[ENDED] != UNKNOWN]
        self.step_lengths.append((terms.mask.sum(1), ended == 0))

    def _measure_native(self, model: nn.Module, kwargs: dict[str, Any], inputs: dict[str, Any], terms: Terms) -> None:
        """Measure the gap without replay, which is kept apart from the gap with it."""
        with torch.no_grad(), forked_rng(self.trainer.accelerator.device):
            native = Terms.of(model(**kwargs).log_probs.flatten(), inputs)
        self.log.observe("train", native.logprobs, terms.rollout, terms.mask, native=True)

    def _corrected(self, terms: Terms, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the micro-batch with weighted advantages; each token's term in TRL's loss scales with its advantage.

        `decoupled`: the old policy is the policy in this pass, because no optimizer step lies between the two. TRL's own ratio is
        then 1, with its gradient, and the importance weight pi_old/mu multiplies it. `bypass` with `ppo_clip`: TRL's ratio stays
        pi/mu, and rejected tokens weigh nothing. `bypass` with `reinforce`: TRL's ratio is 1, and the weight is pi/mu.
        """
        settings = self.correction
        assert settings is not None
        found = correct(terms.rollout, terms.logprobs, terms.mask, settings, advantages=terms.advantages)
        for name, value in metrics_over_ranks(found.metrics, terms.mask, settings, self.ranks).items():
            self.trainer._metrics["train"][PREFIX + name].append(value)
        clips = settings.mode == "bypass" and settings.loss == "ppo_clip"
        weights = found.mask.float() if clips else found.as_multiplier()
        chosen = inputs[INDEX] >= 0
        changed = dict(inputs)
        changed[ADVANTAGES] = inputs[ADVANTAGES].clone()
        changed[ADVANTAGES][chosen] *= weights[terms.mask].to(inputs[ADVANTAGES].dtype)
        if not clips:
            changed[OLD] = inputs[OLD].clone()
            changed[OLD][chosen] = terms.logprobs[terms.mask]
        return changed

    def routed(self, inputs: dict[str, Any], kwargs: dict[str, Any]) -> AbstractContextManager[None]:
        """Return the context that runs the row's forward pass under the routes that came with its rollouts."""
        if self.routing is None:
            return nullcontext()
        real = inputs["attention_mask"].bool()
        return self.routing.over_tree(self.trainer.model, kwargs, inputs[ROUTES][real], inputs[ROUTED][real])
