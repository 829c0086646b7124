"""Verifies every weight update of TRL's engine wrapper, and records every rollout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import is_peft_model
from mismatch_ext.adapters import vllm as engine
from mismatch_ext.adapters.transformers.checkpoint import under_checkpoint_names
from mismatch_ext.adapters.transformers.routing import MoeLayout
from mismatch_ext.adapters.trl.centering import EngineHeads
from mismatch_ext.adapters.trl.lora import Base
from mismatch_ext.adapters.trl.sampling_mask import EngineMasks
from mismatch_ext.adapters.vllm.routing import judged_traces
from mismatch_ext.patches.vllm.top_logprobs import storing
from torch import Tensor

from mismatch_ext.bad_rows import BadRows
from mismatch_ext.centering import TopTokens
from mismatch_ext.errors import RecordError
from mismatch_ext.evidence import ColumnBatch
from mismatch_ext.patching import applied
from mismatch_ext.ranks import ONE_PROCESS, Ranks, agree, together
from mismatch_ext.rollout import Provenance, RolloutRecord, to_records
from mismatch_ext.routing import RoutingTrace
from mismatch_ext.weights import TrainerLook

if TYPE_CHECKING:
    from mismatch_ext.adapters.trl.host import TrainerRun


class CheckedGeneration:
    """Puts its own methods before those of TRL's `VLLMGeneration`."""

    def __init__(
        self,
        run: TrainerRun,
        *,
        vocabulary: Tensor,  # ids [V] that probes may use, on the model's device
        patch_digest: str = "none",
        layout: MoeLayout | None = None,  # None records no routes
        masks: EngineMasks | None = None,
        heads: EngineHeads | None = None,
        base: Base | None = None,
    ) -> None:
        self.run, self.engine, self.checks = run, run.engine, run.checks
        self.patch_digest, self.layout, self.masks, self.base = patch_digest, layout, masks, base
        self.heads = heads
        if layout is not None:
            self.engine.record_routing()
        self.weight_version = 0
        self.reading = self.engine.reading()
        self._kept: list[RolloutRecord] | None = None
        self._refused: Exception | None = None  # why this rank's rollouts of the batch are refused
        self._sent_at: int | None = None  # step of the last weight update
        self._inner = inner = run.trainer.vllm_generation
        self._plain_sync, self._plain_parameters = inner.sync_weights, inner._iter_named_params
        self.plain_generate = inner.generate
        self._sending = engine.Sending()
        self.verifier = run.verifier_of(self.engine, vocabulary)
        self.verifies = False

    def begin(self) -> None:
        """Take the place of TRL's methods, and note the gap before the first update; all ranks do so together."""
        # RLOOTrainer asks for no log-probabilities, and drops those that it gets.
        self._inner.logprobs = 0 if self._inner.logprobs is None else self._inner.logprobs
        if self.masks is not None:
            self._inner.logprobs = self.masks.asked
        if self.heads is not None:
            self._inner.logprobs = self.heads.asked
        # In sleep mode TRL pushes weights from inside generate(): that update goes through here too.
        self._inner.sync_weights, self._inner._iter_named_params = self.sync_weights, self._sent_parameters
        self._inner.generate = self.generate
        if self.run.proves:
            with self.checks.checking("weight_sync"):
                with together(self.run.ranks):
                    if self.engine.fresh and self.run.prepared:
                        self.verifier.begin()
                self.verifies = True  # on all ranks or none, because verifying takes all of them

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run continues with, as JSON-able data."""
        return {"weight_version": self.weight_version, "weight_sync": self.verifier.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> str | None:
        """Continue from what `state_dict` returned; return what begins anew because settings changed, if anything does."""
        self.weight_version = state["weight_version"]
        return self.verifier.load_state_dict(state["weight_sync"])

    def sync_weights(self, *args: Any, **kwargs: Any) -> None:
        """Update the engine's weights and verify that it computes with them; all ranks do so, or raise, together."""
        self._sync(self.run.ranks, *args, **kwargs)

    def _sync(self, ranks: Ranks, *args: Any, **kwargs: Any) -> None:
        if self.verifies and self.engine.fresh and not (self.run.step or self.weight_version or self.verifier.begun):
            with self._checking("weight_sync", ranks):
                self.verifier.begin()
        # Sharded weights are scored by all ranks together, so that none may have failed before. Where the engine sleeps, the
        # trainer has the device's memory to itself until the update.
        scores = self._trainer_scores(ranks) if self.verifies else None
        with together(ranks), self._to_the_end():
            self.engine.update(partial(self._plain_sync, *args, **kwargs), self._sent_parameters)
        self.weight_version += 1
        stepped = self._sent_at not in (None, self.run.step)
        if ranks.size == self.run.ranks.size:
            # Ranks decide by this whether to update together, so that an update on one of them does not count.
            self._sent_at = self.run.step
        with self._checking("precision", ranks):
            self.run.sent(frozenset(self._sending.dtypes))
        if scores is not None:
            with self._checking("weight_sync", ranks):
                look = TrainerLook(logprobs=scores, fingerprint=self.run.fingerprint())
                self.verifier.verify(self._sending.samples, look, stepped=stepped)

    @contextmanager
    def _checking(self, check: str, ranks: Ranks) -> Iterator[None]:
        """Run a check of an update, in which all of these ranks raise together."""
        with self._alone(ranks), self.checks.checking(check), together(ranks):
            yield

    def _alone(self, ranks: Ranks) -> AbstractContextManager[None]:
        # An error of a rank that updates by itself is kept until all have generated. Its engine's is not, because TRL would send
        # the weights again.
        return nullcontext() if ranks is self.run.ranks else self._refusing()

    def _trainer_scores(self, ranks: Ranks) -> Tensor | None:
        """Return the trainer's log-probabilities of the probes, on all ranks; on all of them None if that fails on one."""
        with self._alone(ranks), self.checks.checking("weight_sync"):
            with together(ranks):
                scores = self.run.score(self.verifier.probes)
            return scores
        return None

    @contextmanager
    def _to_the_end(self) -> Iterator[None]:
        """If sending fails here, go on gathering weights, because other ranks wait for this one's parts."""
        self._parameters: Iterator[tuple[str, Tensor]] = iter(())
        try:
            yield
        except Exception:
            for _ in self._parameters:
                pass
            raise

    def _sent_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Return an iterator over what TRL sends to the engine."""
        self._parameters = self._noted_parameters(*args, **kwargs)
        return self._parameters

    def _noted_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield what TRL sends to the engine, noting dtypes and what the engine should then hold."""
        # One pass for both: TRL merges LoRA adapters for each pass, and merging into half-precision weights does not come out the
        # same twice.
        self._sending = engine.Sending()
        plain = partial(self._plain_parameters, *args, **kwargs)
        sent = plain() if self.base is None else self.base.with_adapters(plain)
        if self.checks.acts:  # otherwise the engine gets what TRL sends
            sent = under_checkpoint_names(self._sent_model(), sent)
        yield from self._sending.through(sent)

    def _sent_model(self) -> Any:
        """Return the model whose parameters TRL names: unwrapped, and without adapters, which TRL merges."""
        model = self.run.trainer.accelerator.unwrap_model(self.run.trainer.model)
        return model.get_base_model() if is_peft_model(model) else model

    def sync_if_asleep(self) -> None:
        """Update an engine that sleeps, which TRL would do while it generates, among outputs that are not probes'."""
        if getattr(self._inner, "_llm_weights_sleeping", False):
            self._sync(ONE_PROCESS)  # a rank may generate by itself

    def provenance(self) -> Provenance:
        """Describe where a rollout made now comes from."""
        return engine.to_provenance(
            self.reading,
            sampling=self.run.sampling,
            weight_version=self.weight_version,
            patch_digest=self.patch_digest,
        )

    def send_moved(self) -> None:
        """Update the engine if weights changed without a step, as when a checkpoint is loaded; all ranks do so together."""
        # TRL counts steps alone.
        if self.verifies:
            moved = torch.tensor(float(self.verifier.moved()))
            if bool(self.run.ranks.sum(moved)):
                self._sync(self.run.ranks)
        self._sent_at = self.run.step

    def generate(self, prompts: Sequence[Sequence[int]], *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Generate as TRL does, and check the rollouts as records with their provenance; `keeping` collects the records."""
        # A rank may generate by itself: with more turns than others in a batch, in a `rollout_func`, or in a callback.
        in_batch = self._kept is not None
        if self.run.ranks.size == 1 and not in_batch:
            self.send_moved()
        if in_batch and self._sent_at != self.run.step:
            self.send_moved()  # a subclass generates without TRL's update
        self.sync_if_asleep()
        # Given a version, `captured` resets the prefix cache where TRL has not, because the cache holds routes.
        version = None if self.layout is None else lambda: self.weight_version
        # TRL keeps token ids and log-probabilities of the engine's outputs, and drops the rest.
        patches = () if self.masks is None else self.masks.patches
        if self.heads is not None:
            patches = self.heads.patches
        taking = nullcontext() if self.heads is None else storing(TopTokens)
        with self.engine.captured(version) as outputs, applied(*patches), taking:
            result: tuple[Any, ...] = self.plain_generate(prompts, *args, **kwargs)
        with self._refusing():
            bad = BadRows(len(result[1]))
            supports = None
            if self.masks is not None:
                supports, result = self.masks.of(result, outputs if patches else None, bad)
            heads = None
            if self.heads is not None:
                heads, result = self.heads.of(result, outputs if patches else None, bad)
            self.keep(
                result,
                bad,
                routing=self._routing(outputs, bad),
                supports=supports,
                heads=heads,
                finish_reasons=_of_completions(outputs, result[1], lambda output, completion: completion.finish_reason),
                cached_tokens=_of_completions(outputs, result[1], _cached_tokens),
            )
        return result

    def keep(self, result: tuple[Any, ...], bad: BadRows | None = None, **known: Any) -> None:
        """Make records of what TRL's wrapper returned, and keep them while there is a batch.

        Args:
            result: What it returned.
            bad: The rows whose routes or masks could not be read.
            known: Arguments of `to_records`.
        """
        prompt_ids, completion_ids, logprobs, *_ = result
        sampled = [[top[0] for top in row] for row in logprobs]
        provenance = self.provenance()
        batch = ColumnBatch(
            prompts=prompt_ids,
            responses=completion_ids,
            rollout=sampled,
            provenance=provenance,
            step=self.run.step,
            settings=self.run.trainer_settings,
        )
        with self.run.log.refusing(self.run.split, batch):
            records = to_records(prompt_ids, completion_ids, sampled, provenance=provenance, **known)
        for row, fault in (bad.faults if bad is not None else {}).items():
            if records[row].fault is None:
                records[row] = replace(records[row], fault=fault)
        if self._kept is not None:
            self._kept += records

    def _routing(self, outputs: Sequence[Any], bad: BadRows) -> list[RoutingTrace | None] | None:
        """Return the routes of the completions that were just sampled, in their order; None for those of bad rows."""
        if self.layout is None:
            return None
        if len(outputs) != bad.size:
            raise RecordError(
                f"{bad.size} completions, but {len(outputs)} outputs of LLM.generate were seen: something else stands in for "
                "it, so the routes of the completions are not known. Remove it, or mismatch.routing."
            )
        return judged_traces(outputs, shape=self.layout.shape, version=self.weight_version, bad=bad)

    @contextmanager
    def keeping(self, records: list[RolloutRecord]) -> Iterator[None]:
        """Add to a list what is generated in a block, which all ranks enter; `agree` tells whether it is refused."""
        if self._sent_at == self.run.step:
            self.send_moved()  # otherwise TRL sends the weights before it generates
        self._kept, self._refused = records, None
        try:
            yield
        finally:
            self._kept = self._refused = None

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Keep an error of this rank's rollouts until all ranks have generated, because TRL lets them wait for each other."""
        try:
            yield
        except Exception as error:
            if self._kept is None or self.run.ranks.size == 1:
                raise
            self._refused = self._refused or error

    def agree(self) -> None:
        """Raise on every rank if rollouts of one rank are refused; all ranks call it once they have generated."""
        agree(self._refused, self.run.ranks)


def _of_completions(
    outputs: Sequence[Any], completion_ids: Sequence[Sequence[int]], read: Callable[[Any, Any], Any]
) -> list[Any] | None:
    """Return what is read of each completion and its output; None where the outputs seen are not those of the completions."""
    seen = [(output, completion) for output in outputs for completion in output.outputs]
    known = {id(completion.token_ids): read(output, completion) for output, completion in seen}
    if all(
        id(ids) in known for ids in completion_ids
    ):  # with tensor parallelism TRL takes the rank's own from those of all ranks
        return [known[id(ids)] for ids in completion_ids]
    if [list(completion.token_ids) for _, completion in seen] != [list(ids) for ids in completion_ids]:
        return None
    return [read(output, completion) for output, completion in seen]


def _cached_tokens(output: Any, completion: Any) -> int | None:
    """Return how many prompt tokens came from the prefix cache; of several completions, vLLM says it of one of them."""
    return getattr(output, "num_cached_tokens", None) if len(output.outputs) == 1 else None
