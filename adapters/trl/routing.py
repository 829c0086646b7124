"""The `routing` section in TRL: which routes belong to which forward pass.

R3: the routes of whoever sampled travel with the completions, as `inputs["routing"]`, through TRL's shuffling and splitting,
and are replayed in the old-logprob pass and in every update. R2: the trainer's old-logprob pass records them instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from mismatch_ext.adapters.transformers.routing.generate import record_generation
from mismatch_ext.adapters.trl.aggregation import overridden
from mismatch_ext.adapters.trl.replay import RoutingReplay, Scores, matching, on_cpu, share
from torch import Tensor, nn
from transformers.utils import is_peft_available

from mismatch_ext.errors import ConfigError, ReplayError, RoutingError
from mismatch_ext.routing import OTHER_PASSES, Agreement, RoutingTrace

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

    _routing: RoutingReplay | None = None
    # What compares routes and replays none.
    _watched_routing: RoutingReplay | None = None
    # Routes of the micro-batch whose loss is being computed.
    _routes: Sequence[RoutingTrace] | None = None
    _eval_split: str
    # Log-probabilities of the pass that R2 records where TRL takes none over the batch's tokens.
    _own_scores: Tensor | None = None
    _score_again: Callable[[Any], Tensor]
    vllm_generation: CheckedGeneration  # type: ignore[assignment]  # around TRL's own
    # From construction on there is one.
    model: nn.Module

    @property
    def _split(self) -> str:
        return "train" if self.model.training else self._eval_split

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as TRL does; where the trainer's own model generates, record its routes."""
        routing = self._routing
        if routing is None or routing.config.mode != "R3" or self.use_vllm:
            return super()._generate_single_turn(*args, **kwargs)
        with record_generation(self.model, version=self.state.global_step) as recording:
            output = super()._generate_single_turn(*args, **kwargs)
        prompts = kwargs["prompt_ids"] if "prompt_ids" in kwargs else args[0]
        routing.traces = share([on_cpu(trace) for trace in recording.traces], prompts)
        return output

    def _known_routes(self) -> Sequence[Sequence[RoutingTrace]]:
        """Return the routes of the batch that was just sampled: the sampler's, or those of each pass that R2 recorded."""
        routing = self._routing
        assert routing is not None
        if routing.config.mode == "R2":
            return routing.recorded
        if routing.traces is None:
            records, version = self.vllm_generation.records, self.vllm_generation.weight_version
            routes = []
            for record in records:
                assert record.routing is not None  # recorded, or refused, where CheckedGeneration has a layout
                record.routing.expect_version(version)
                routes.append(record.routing)
            routing.traces = share(routes, [record.prompt_ids for record in records])
        return [routing.traces]

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
            # TRL 1.14 takes the size by keyword alone.
            scores: Scores = host(model, ids, mask, length, batch_size=size, **options)
            return scores

        given = (input_ids, attention_mask, logits_to_keep, batch_size)
        reference = routing is not None and self._is_reference(model)
        if routing is None or (reference and not routing.config.reference):
            return score(model, *given, **options)
        if self._routes is None and not routing.in_batch:
            return score(model, *given, **options)  # somebody's own pass, over tokens that have no routes
        rows = (input_ids, attention_mask, logits_to_keep)
        routes = self._routes_of(*rows)
        if routes is None and self._routes is None and routing.config.mode == "R2":
            if not reference:
                return routing.record(score, model, *given, version=self.state.global_step, **options)
            self._refuse_early_reference(model)
            with torch.random.fork_rng():  # TRL takes no such pass
                routing.record(score, self.model, *given, version=self.state.global_step, **options)
            routes = self._routes_of(*rows)
        if routes is None:
            # Somebody's own pass over other tokens: what they would be given are the experts of the batch's.
            routing.others["reference" if reference else self._split] += 1
            return score(model, *given, **options)
        # The reference's own choice says nothing about the gap between engine and trainer.
        return routing.replay(score, model, *given, traces=routes, split=None if reference else self._split, **options)

    def _routes_of(self, tokens: Tensor, attention_mask: Tensor, length: int) -> list[RoutingTrace] | None:
        """Return the routes of a scoring pass, of the micro-batch or else of the present batch; None where they have none."""
        assert self._routing is not None
        recorded = [self._routes] if self._routes is not None else self._known_routes()
        found = (matching(routes, tokens, attention_mask, length) for routes in recorded)
        return next((routes for routes in found if routes is not None), None)

    def _batch_routes(self, output: Mapping[str, Any]) -> list[RoutingTrace]:
        """Return the routes of a batch, a row of it each, when it has been scored.

        Raises:
            RoutingError: What was recorded is of other tokens.
        """
        routing = self._routing
        assert routing is not None
        rows = _rows(output)
        if (routes := self._routes_of(*rows)) is None and routing.config.mode == "R2":
            # TRL took no pass over the batch's tokens that R2 could record.
            self._own_scores = self._score_again(output)
            routes = self._routes_of(*rows)
        if routes is None:
            raise RoutingError(_OTHER_TOKENS.format("recorded while the batch was sampled", routing.config.mode))
        routing.others[self._split] += max(len(routing.recorded) - 1, 0)
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
        if matching(inputs[KEY], *_rows(inputs)) is None:
            raise RoutingError(_OTHER_TOKENS.format("that travelled with the micro-batch", routing.config.mode))
        before = routing.forwards
        with overridden(self, _routes=inputs[KEY]):
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
        assert self._routes is not None
        return routing.replaying(model, attention_mask, length, self._routes, None if reference else self._split)

    def _other_passes(self, split: str) -> dict[str, float]:
        """Return how many forward passes of a split were over other tokens than were recorded, over all ranks."""
        routing = self._routing
        if routing is None:
            return {}
        counts = [routing.others.pop(split, 0) + (routing.others.pop("reference", 0) if split == "train" else 0)]
        if self.accelerator.num_processes > 1:
            counts = gather_object(counts)
        return {OTHER_PASSES: float(sum(counts))}

    def _routing_agreement(self, split: str) -> Agreement | None:
        """Return the agreement since the last log, over all ranks; None where nothing was measured."""
        routing = self._watched_routing if self._routing is None else self._routing
        if routing is None:
            return None
        mine = routing.agreements(split)
        found = [] if mine is None else [mine]
        if self.accelerator.num_processes > 1:
            states = gather_object([None if mine is None else mine.state_dict()])
            found = [Agreement.from_state(state) for state in states if state is not None]
        return functools.reduce(Agreement.merge, found) if found else None


def _rows(inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor, int]:
    """Return tokens and attention mask `[B, S]` of a batch as TRL scores it, and its completion positions."""
    tokens = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    return (
        tokens,
        torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
        inputs["completion_ids"].size(1),
    )
