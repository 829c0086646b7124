"""The methods of TRL that run its model, under the routes that belong to each forward pass.

R3: the sampler's routes travel with the completions, as `inputs["routing"]`, through TRL's shuffling and splitting,
and are replayed in the old-logprob pass and in every update. R2: the trainer's old-logprob pass records them instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from mismatch_ext.adapters.trl.overridden import overridden
from mismatch_ext.adapters.trl.passes import RolloutPass
from mismatch_ext.adapters.trl.replay import ScoreReplay, Scores, matching, share
from torch import Tensor, nn
from transformers.utils import is_peft_available

from mismatch_ext.errors import ConfigError, ReplayError, RoutingError
from mismatch_ext.ranks import Ranks
from mismatch_ext.rng import forked_rng
from mismatch_ext.routing import RoutingTrace
from mismatch_ext.routing.replay import REFERENCE

if TYPE_CHECKING:
    from mismatch_ext.adapters.trl.generation import CheckedGeneration
    from trl import GRPOTrainer as _Host
else:
    _Host = object

KEY = "routing"
_OTHER_TOKENS = (
    "the routes {} are of other tokens than those that are trained on (mismatch.routing.mode={!r}): rows moved or tokens "
    "changed between sampling and the loss without their routes. Move inputs['routing'] with the other inputs, and leave "
    "prompt_ids, completion_ids and their masks as they were sampled."
)


class RoutingMixin(_Host):
    """Overrides the methods of GRPOTrainer that run its model; `MismatchTrainerMixin` sets what is active."""

    _routing: ScoreReplay | None = None
    # Compares routes and replays none.
    # The batch that is generated and scored, or the micro-batch whose loss is computed; None between them.
    _rollout_pass: RolloutPass | None = None
    _eval_split: str
    _ranks: Ranks
    _score_again: Callable[[Any], Tensor]
    vllm_generation: CheckedGeneration  # type: ignore[assignment]  # around TRL's own
    # Set from construction on.
    model: nn.Module

    @property
    def _split(self) -> str:
        return "train" if self.model.training else self._eval_split

    def _take_engines_routes(self, batch: RolloutPass) -> None:
        """Take the routes of a batch from the engine's records of it, once."""
        assert self._routing is not None
        if batch.routes or batch.joining or not batch.records or self._routing.config.mode != "R3":
            return
        routes, version = [], self.vllm_generation.weight_version
        for record in batch.records:
            assert record.routing is not None  # recorded, or refused, where CheckedGeneration has a layout
            record.routing.expect_version(version)
            routes.append(record.routing)
        batch.routes = [share(routes, [record.prompt_ids for record in batch.records])]

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **options: Any,
    ) -> Scores:
        """Score tokens as TRL does, under the routes that were recorded for them."""
        routing, host = self._routing, super()._get_per_token_logps_and_entropies

        def score(model: Any, ids: Tensor, mask: Tensor, length: int, size: int | None, **options: Any) -> Scores:
            # TRL 1.14 takes the size only by keyword.
            scores: Scores = host(model, ids, mask, length, batch_size=size, **options)
            return scores

        given = (input_ids, attention_mask, logits_to_keep, batch_size)
        reference = routing is not None and self._is_reference(model)
        if routing is None or (reference and not routing.config.reference):
            return score(model, *given, **options)
        batch = self._rollout_pass
        if batch is None:
            return score(model, *given, **options)  # somebody's own pass, over tokens that have no routes
        self._take_engines_routes(batch)
        rows, version = (input_ids, attention_mask, logits_to_keep), self.state.global_step
        routes = batch.routes_of(*rows)
        if routes is None and batch.fresh and routing.config.mode == "R2":
            if not reference:
                scores, recorded = routing.record(score, model, *given, version=version, **options)
                batch.routes.append(recorded)
                return scores
            self._refuse_early_reference(model)
            with forked_rng(input_ids.device):  # TRL takes no such pass
                batch.routes.append(routing.record(score, self.model, *given, version=version, **options)[1])
            routes = batch.routes_of(*rows)
        split = REFERENCE if reference else self._split
        if routes is None:
            # Somebody's own pass over other tokens, which must not be given the experts of the batch's tokens.
            routing.others[split] += 1
            return score(model, *given, **options)
        return routing.replay(score, model, *given, traces=routes, split=split, **options)

    def _batch_routes(self, batch: RolloutPass, output: Mapping[str, Any]) -> list[RoutingTrace]:
        """Return the routes of a batch that has been scored, one trace for each row.

        Raises:
            RoutingError: The recorded routes are of other tokens.
        """
        routing = self._routing
        assert routing is not None
        self._take_engines_routes(batch)
        rows, recorded = rows_of_batch(output), routing.config.mode == "R2"
        if (routes := batch.routes_of(*rows)) is None and recorded:
            # TRL took no pass over the batch's tokens that R2 could record.
            batch.policy = self._score_again(output)
            routes = batch.routes_of(*rows)
        if routes is None:
            raise RoutingError(_OTHER_TOKENS.format("recorded while the batch was sampled", routing.config.mode))
        if recorded:
            routing.others[self._split] += max(len(batch.routes) - 1, 0)
        return routes

    def _is_reference(self, model: Any) -> bool:
        """Tell whether a pass is the reference policy's: a model of its own, or the trained one without its adapter."""
        if self.ref_model is not None:
            return model is self.ref_model
        if not is_peft_available():
            return False
        from peft.tuners.tuners_utils import BaseTunerLayer

        layers = (layer for layer in model.modules() if isinstance(layer, BaseTunerLayer))
        return any(layer.disable_adapters or "ref" in layer.active_adapters for layer in layers)

    def _refuse_early_reference(self, model: Any) -> None:
        if model is not self.ref_model:
            raise ConfigError(
                "mismatch.routing mode='R2' with reference=True and an adapter, in a setup where TRL takes no old-logprob pass: "
                "the reference is scored before any pass of the policy that could be recorded. Set reference=False, or "
                "mode='R3'."
            )

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss as TRL does, under the routes that travelled with the micro-batch.

        Raises:
            RoutingError: The routes are of other tokens than the micro-batch's.
            ReplayError: TRL did not run the model through the scoring pass that replay covers.
        """
        routing = self._routing
        if routing is None:
            return super().compute_loss(model, inputs, *args, **kwargs)
        if KEY not in inputs:
            raise ReplayError(
                f"mismatch.routing.mode={routing.config.mode!r}, but the micro-batch has no {KEY!r}: something between "
                "_generate_and_score_completions and compute_loss dropped it. Pass it on with the other inputs."
            )
        if matching(inputs[KEY], *rows_of_batch(inputs)) is None:
            raise RoutingError(_OTHER_TOKENS.format("that travelled with the micro-batch", routing.config.mode))
        before = routing.forwards
        micro_batch = RolloutPass(fresh=False, routes=[inputs[KEY]])
        with overridden(self, _rollout_pass=micro_batch):
            loss = super().compute_loss(model, inputs, *args, **kwargs)
        if routing.forwards == before:
            raise ReplayError(
                f"mismatch.routing.mode={routing.config.mode!r}, but the loss was computed without a replayed forward pass: "
                "something overrides _get_per_token_logps_and_entropies, or gives it other tokens than the micro-batch's. Remove "
                "it, or mismatch.routing."
            )
        return loss

    def _routed(self, model: Any, attention_mask: Tensor, length: int) -> AbstractContextManager[None]:
        """Return the context for one more forward pass of the micro-batch whose loss is being computed."""
        routing = self._routing
        reference = routing is not None and self._is_reference(model)
        if routing is None or (reference and not routing.config.reference):
            return nullcontext()
        assert self._rollout_pass is not None
        split = REFERENCE if reference else self._split
        return routing.over_rows(model, attention_mask, length, self._rollout_pass.routes[0], split)

    def _other_passes(self, split: str) -> dict[str, float]:
        """Return how many forward passes of a split were over other tokens than were recorded, over all ranks."""
        return {} if self._routing is None else self._routing.take_others(split, self._ranks)

    def _routing_agreement(self, split: str) -> dict[str, float]:
        """Return the agreement since the last log, over all ranks; nothing where nothing was measured."""
        return {} if self._routing is None else self._routing.take_agreement(split, self._ranks)


def rows_of_batch(inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor, int]:
    """Return tokens and attention mask `[B, S]` of a batch as TRL scores it, and its completion positions."""
    tokens = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    return (
        tokens,
        torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
        inputs["completion_ids"].size(1),
    )
