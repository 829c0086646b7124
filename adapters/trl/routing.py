"""The `routing` section in TRL: which routes belong to which forward pass.

R3: the routes of whoever sampled travel with the completions, as `inputs["routing"]`, through TRL's shuffling and splitting,
and are replayed in the old-logprob pass and in every update. R2: the trainer's old-logprob pass records them instead.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from mismatch_ext.adapters.transformers.routing import moe_layout, record_routing, replay_routing
from mismatch_ext.adapters.transformers.routing.generate import record_generation
from mismatch_ext.adapters.trl.aggregation import overridden
from torch import Tensor, nn
from transformers.utils import is_peft_available

from mismatch_ext.config import RoutingConfig
from mismatch_ext.errors import ConfigError, ReplayError, RoutingError
from mismatch_ext.routing import Agreement, RoutingTrace, agreement, align, check_plausible, share_prompts

if TYPE_CHECKING:
    from trl import GRPOTrainer as _Host
else:
    _Host = object

KEY = "routing"
Scores = tuple[Tensor, Tensor | None, Tensor | None]
Score = Callable[..., Scores]


class RoutingReplay:
    """Records or replays routing around TRL's scoring passes, and counts how far it differs from the model's own.

    Args:
        config: The `routing` section.
        model: The trainer's model.
        seed: Seed of the choice of passes that are measured; the same on every rank.

    Attributes:
        in_batch: Whether a batch is being sampled and scored.
        traces: Routes of its completions, a row of the batch each; None until they are known.
        forwards: Forward passes that were replayed.

    Raises:
        ReplayError: The model's routing cannot be replayed.
    """

    def __init__(self, config: RoutingConfig, model: nn.Module, seed: int) -> None:
        self.config = config
        self.layout = moe_layout(model)
        self.in_batch = False
        self.traces: list[RoutingTrace] | None = None
        self.forwards = 0
        self._random = random.Random(seed)
        self._agreement: dict[str, Agreement] = {}
        self._checked = config.mode == "R2"  # the model's own routes need no such check

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Hold the routes of one batch while it is sampled and scored."""
        self.in_batch, self.traces = True, None
        try:
            yield
        finally:
            self.in_batch, self.traces = False, None

    def compares_gap(self) -> bool:
        """Draw whether a rollout batch is scored without replay as well."""
        return self._random.random() < self.config.native_gap_rate

    def agreements(self, split: str) -> Agreement | None:
        """Return what was measured in a split since the last call, and forget it."""
        return self._agreement.pop(split, None)

    @contextmanager
    def replaying(
        self, model: nn.Module, attention_mask: Tensor, length: int, traces: Sequence[RoutingTrace], split: str | None
    ) -> Iterator[None]:
        """Run the forward pass of a padded micro-batch under the routes of its rows.

        Args:
            model: The model, possibly wrapped.
            attention_mask: 1 for tokens that are not padding `[B, S]`.
            length: Completion positions per row, padding included.
            traces: Routes of each row.
            split: "train" or "eval/<name>", which the agreement is counted for; None counts none.

        Raises:
            RoutingError: Routes do not fit their tokens.
            ReplayError: A forward pass did not obey them.
        """
        trace, recorded = _aligned(traces, attention_mask, length)
        measured = split is not None and self._random.random() < self.config.agreement_rate
        with replay_routing(model, trace, recorded, native=measured) as replay:
            yield
        self.forwards += replay.forwards
        if split is not None and measured:
            new = agreement(trace, replay.native, recorded, real=attention_mask.bool().flatten())
            self._agreement[split] = self._agreement[split].merge(new) if split in self._agreement else new

    def replay(
        self,
        score: Score,
        model: nn.Module,
        tokens: Tensor,
        attention_mask: Tensor,
        length: int,
        batch_size: int | None,
        *,
        traces: Sequence[RoutingTrace],
        split: str | None,
        **options: Any,
    ) -> Scores:
        """Run TRL's scoring pass, a chunk of rows at a time, each under the routes of its rows.

        Args:
            score: TRL's own `_get_per_token_logps_and_entropies`.
            model: The model, possibly wrapped.
            tokens: Prompt and completion `[B, S]`.
            attention_mask: 1 for tokens that are not padding `[B, S]`.
            length: Completion positions per row, padding included.
            batch_size: Rows per forward pass; None for all at once.
            traces: Routes of each row.
            split: "train" or "eval/<name>", which the agreement is counted for; None counts none.
            options: What else TRL passes.

        Returns:
            Log-probabilities `[B, T]`, entropies or None, auxiliary loss or None, as TRL returns them.

        Raises:
            RoutingError: Routes do not fit their tokens.
            ReplayError: A forward pass did not obey them.
        """
        _refuse_multimodal(options)
        if len(traces) != len(tokens):
            raise RoutingError(f"{len(traces)} routing traces for {len(tokens)} completions; one of each is needed.")
        parts = []
        for rows in _chunks(len(tokens), batch_size):
            if not self._checked and split is not None:
                # Once: another layer's routes are valid ids too, and only the policy can tell them apart.
                self._check(score, model, tokens[rows], attention_mask[rows], length, traces[rows])
                self._checked = True
            with self.replaying(model, attention_mask[rows], length, traces[rows], split):
                parts.append(score(model, tokens[rows], attention_mask[rows], length, batch_size, **options))
        return _joined(parts)

    def _check(
        self,
        score: Score,
        model: nn.Module,
        tokens: Tensor,
        attention_mask: Tensor,
        length: int,
        traces: Sequence[RoutingTrace],
    ) -> None:
        with torch.no_grad(), torch.random.fork_rng(), record_routing(model) as recording:
            score(model, tokens, attention_mask, length, len(tokens))
        trace, recorded = _aligned(traces, attention_mask, length)
        check_plausible(trace, recording.trace, recorded)

    def record(
        self,
        score: Score,
        model: nn.Module,
        tokens: Tensor,
        attention_mask: Tensor,
        length: int,
        batch_size: int | None,
        *,
        version: int,
        **options: Any,
    ) -> Scores:
        """Run TRL's scoring pass, a chunk of rows at a time, and keep the routes as those of the present batch.

        Args:
            score: TRL's own `_get_per_token_logps_and_entropies`.
            model: The model, possibly wrapped.
            tokens: Prompt and completion `[B, S]`.
            attention_mask: 1 for tokens that are not padding `[B, S]`.
            length: Completion positions per row, padding included.
            batch_size: Rows per forward pass; None for all at once.
            version: Finished optimizer steps.
            options: What else TRL passes.

        Returns:
            Log-probabilities `[B, T]`, entropies or None, auxiliary loss or None, as TRL returns them.
        """
        _refuse_multimodal(options)
        parts: list[Scores] = []
        traces: list[RoutingTrace] = []
        for rows in _chunks(len(tokens), batch_size):
            with record_routing(model, version=version) as recording:
                parts.append(score(model, tokens[rows], attention_mask[rows], length, batch_size, **options))
            traces += rows_of(recording.trace, attention_mask[rows])
        self.traces = share(traces, prompts_of(tokens, attention_mask, length))
        return _joined(parts)


class RoutingMixin(_Host):
    """Overrides the methods of GRPOTrainer that run its model; `MismatchTrainerMixin` sets what is active."""

    _routing: RoutingReplay | None = None
    # Routes of the micro-batch whose loss is being computed.
    _routes: Sequence[RoutingTrace] | None = None
    _eval_split: str

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

    def _sampled_routes(self) -> list[RoutingTrace] | None:
        """Return the routes of the batch that was just sampled; None where R2 has still to record them."""
        routing = self._routing
        assert routing is not None
        if routing.traces is None and routing.config.mode == "R3":
            records, version = self.vllm_generation.records, self.vllm_generation.weight_version
            for record in records:
                record.routing.expect_version(version)
            routing.traces = share([record.routing for record in records], [record.prompt_ids for record in records])
        return routing.traces

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
        routing, score = self._routing, super()._get_per_token_logps_and_entropies
        given = (input_ids, attention_mask, logits_to_keep, batch_size)
        reference = routing is not None and self._is_reference(model)
        if routing is None or (reference and not routing.config.reference):
            return score(model, *given, **options)
        if self._routes is None and not routing.in_batch:
            return score(model, *given, **options)  # somebody's own pass, over tokens that have no routes
        routes = self._routes if self._routes is not None else self._sampled_routes()
        if routes is None and reference:
            self._refuse_early_reference(model)
            with torch.random.fork_rng():  # TRL takes no such pass
                routing.record(score, self.model, *given, version=self.state.global_step, **options)
            routes = routing.traces
        if routes is None:
            return routing.record(score, model, *given, version=self.state.global_step, **options)
        # The reference's own choice says nothing about the gap between engine and trainer.
        return routing.replay(score, model, *given, traces=routes, split=None if reference else self._split, **options)

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
        before = routing.forwards
        with overridden(self, _routes=inputs[KEY]):
            loss = super().compute_loss(model, inputs, *args, **kwargs)
        if routing.forwards == before:
            raise ReplayError(
                f"mismatch.routing.mode={routing.config.mode!r}, but the loss was computed without a replayed forward pass: "
                "something overrides _get_per_token_logps_and_entropies. Remove it, or mismatch.routing."
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

    def _routing_agreement(self, split: str) -> Agreement | None:
        """Return the agreement since the last log, over all ranks; None where nothing was measured."""
        if self._routing is None:
            return None
        mine = self._routing.agreements(split)
        found = [] if mine is None else [mine]
        if self.accelerator.num_processes > 1:
            states = gather_object([None if mine is None else mine.state_dict()])
            found = [Agreement.from_state(state) for state in states if state is not None]
        return functools.reduce(Agreement.merge, found) if found else None


def share(traces: Sequence[RoutingTrace], prompts: Sequence[Sequence[int]]) -> list[RoutingTrace]:
    """Store the routes of a prompt once for all of its completions."""
    keys = [tuple(prompt) for prompt in prompts]
    return share_prompts(traces, [len(prompt) for prompt in keys], keys).traces


def prompts_of(tokens: Tensor, attention_mask: Tensor, length: int) -> list[list[int]]:
    """Return the prompts of a padded batch as token ids."""
    prompts, real = tokens[:, :-length].cpu(), attention_mask[:, :-length].bool().cpu()
    return [row[mask].tolist() for row, mask in zip(prompts, real, strict=True)]


def on_cpu(trace: RoutingTrace) -> RoutingTrace:
    """Return a trace in the host's memory: TRL holds those of a whole generation batch, for several updates."""
    return replace(trace, parts=tuple(part.cpu() for part in trace.parts))


def rows_of(trace: RoutingTrace, attention_mask: Tensor) -> list[RoutingTrace]:
    """Cut the routes of a padded batch into one trace per row, padding left out.

    Args:
        trace: Routes of all positions of the batch, row after row.
        attention_mask: 1 for tokens that are not padding `[B, S]`, contiguous in each row.
    """
    width, trace = attention_mask.size(1), on_cpu(trace)
    traces = []
    for row, mask in enumerate(attention_mask.bool().cpu()):
        real = mask.nonzero()[:, 0]
        first = row * width + int(real[0])
        traces.append(replace(trace.slice(first, first + len(real)), start=0))
    return traces


def fitted(trace: RoutingTrace, mask: Tensor, length: int) -> RoutingTrace:
    """Drop a completion's routes where `mask_truncated_completions` has made padding of it.

    Args:
        trace: Routes of one prompt and completion.
        mask: Its row of the attention mask `[S]`.
        length: Completion positions, the last of the row.
    """
    if bool(mask[-length:].any()):
        return trace
    return trace.slice(0, max(int(mask.sum()) - trace.start, 0))


def _aligned(traces: Sequence[RoutingTrace], attention_mask: Tensor, length: int) -> tuple[RoutingTrace, Tensor]:
    """Return the routes of a padded batch, a row per position, and where there are any."""
    fitting = [fitted(trace, row, length) for trace, row in zip(traces, attention_mask.cpu(), strict=True)]
    return align(fitting, attention_mask)


def _chunks(rows: int, batch_size: int | None) -> Iterator[slice]:
    size = batch_size or rows
    return (slice(first, first + size) for first in range(0, rows, size))


def _joined(parts: Sequence[Scores]) -> Scores:
    """Join the results of chunks as TRL joins its own."""
    logps, entropies, auxiliary = zip(*parts, strict=True)
    return (
        torch.cat(logps),
        None if entropies[0] is None else torch.cat(entropies),
        None if auxiliary[0] is None else torch.stack(auxiliary).mean(),
    )


def _refuse_multimodal(options: Mapping[str, Any]) -> None:
    given = [name for name, value in options.items() if value is not None and not isinstance(value, bool)]
    if given:
        raise RoutingError(
            f"mismatch.routing with multimodal inputs ({', '.join(given)}): their tokens cannot be matched to recorded "
            "routes; remove mismatch.routing for this model."
        )
