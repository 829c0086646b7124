"""The scoring passes of TRL's model, each under the routes and over the sampling masks that belong to its tokens.

R3: the sampler's routes are replayed in the old-logprob pass and in every update. R2: the trainer's old-logprob pass records them
instead. A pass asks for its rows by their tokens (`rows.py`). Rows that are not known are left to the model, and counted.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from mismatch_ext.adapters.trl.bad_rows import Remembered, as_constants, include_equal_rows, take_out
from mismatch_ext.adapters.trl.passes import RolloutPass, Scored
from mismatch_ext.adapters.trl.replay import ScoreReplay, Scores, is_of, share
from mismatch_ext.adapters.trl.rows import (
    RowKey,
    Rows,
    RowTable,
    RowTables,
    find_in,
    row_key,
    row_keys,
    rows_of_batch,
    tokens_of,
)
from mismatch_ext.adapters.trl.sampling_mask import MaskedPass, support_of
from mismatch_ext.patches.trl.fused_head import scoring_with
from torch import Tensor
from transformers.utils import is_peft_available
from trl import GRPOTrainer

from mismatch_ext.bad_rows import BadRows
from mismatch_ext.config import SamplingMaskConfig
from mismatch_ext.errors import ConfigError, MismatchError, RecordError, ReplayError, RoutingError
from mismatch_ext.rng import forked_rng
from mismatch_ext.rollout import unrouted
from mismatch_ext.routing import RoutingTrace
from mismatch_ext.routing.replay import REFERENCE
from mismatch_ext.sampling_mask import TokenSupport

if TYPE_CHECKING:
    from mismatch_ext.adapters.trl.run import TrlRun

OLD, ROLLOUT = "old_per_token_logps", "sampling_per_token_logps"
"""TRL's keys of the trainer's log-probabilities at sampling time, and of the engine's."""
Host = Callable[..., Any]
MASKS = "mismatch.sampling_mask"
_OTHER_TOKENS = (
    "the {} of the batch are of other tokens than those that are trained on ({}): tokens changed after they were sampled. Leave "
    "prompt_ids, completion_ids and their masks as they were sampled."
)


class Scoring:
    """The passes of one trainer's model."""

    def __init__(self, run: TrlRun) -> None:
        self.run, self.trainer = run, run.trainer
        self.routing: ScoreReplay | None = None  # records and replays routes, with the section
        self.masking: SamplingMaskConfig | None = run.block.sampling_mask
        self.tables = RowTables()
        self.batch: RolloutPass | None = None  # that is being generated and scored
        self.replayed: set[RowKey] | None = None  # rows that were replayed for the loss that is being computed
        self._has_gradients = False  # whether that loss has; then only passes with gradients count
        self.passes: list[Scored] | None = None  # takes the host's passes while they are kept
        self.remembered = Remembered()

    def watch(self) -> None:
        """Let the host's passes be kept as TRL sees them, outside of what a subclass makes of them."""
        plain = self.trainer._get_per_token_logps_and_entropies

        def watched(*arguments: Any, **named: Any) -> Scores:
            scores: Scores = plain(*arguments, **named)
            if self.passes is not None:
                model = arguments[0] if arguments else named["model"]
                self.passes.append(Scored.of(arguments, named, self.is_reference(model), scores))
            return scores

        self.trainer._get_per_token_logps_and_entropies = watched

    @contextmanager
    def of_batch(self, batch: RolloutPass, *, keeps_passes: bool) -> Iterator[None]:
        """Know the rows of a batch from here on; until the end of the block it is generated and scored."""
        trainer = self.trainer
        batch.table = self.tables.begin(training=trainer.model.training, step=trainer.state.global_step)
        self.batch, self.passes = batch, batch.scored if keeps_passes else None
        try:
            yield
        finally:
            self.batch = self.passes = None

    @property
    def sections(self) -> str:
        """The sections that a pass is replayed by; empty if none is."""
        routes = "" if self.routing is None else self._routing_section
        return " and ".join(filter(None, (routes, "" if self.masking is None else MASKS)))

    @property
    def _routing_section(self) -> str:
        assert self.routing is not None
        return f"mismatch.routing.mode={self.routing.config.mode!r}"

    # One pass.

    def score(
        self, host: Host, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int,
        *args: Any, **options: Any,
    ) -> Scores:  # fmt: skip
        """Score tokens as TRL does, under the routes and over the masks that are known of them, bad rows as constants."""
        rows = (input_ids, attention_mask, logits_to_keep)
        trained = not self.is_reference(model) and self._is_trained(model)
        # Outside of a loss, TRL scores new rows without gradients: of these it is not known yet whether they are bad.
        may_be_bad = trained and bool(self.remembered) and (self.replayed is not None or torch.is_grad_enabled())
        if not self.sections and not may_be_bad:
            return cast("Scores", host(model, *rows, *args, **options))
        keys = row_keys(*rows)
        if self.sections:
            scores = self._replayed(host, model, rows, keys, trained, *args, **options)
        else:
            scores = host(model, *rows, *args, **options)
        bad = self._are_bad(keys) if may_be_bad else torch.zeros(0, dtype=torch.bool)
        return as_constants(scores, bad) if bool(bad.any()) else scores

    def _replayed(
        self, host: Host, model: Any, rows: Rows, keys: Sequence[RowKey], trained: bool, *args: Any, **options: Any
    ) -> Scores:
        """Score rows under their routes and over their masks, as far as these are known."""
        self._take_engines_rows()
        supports = self._supports_of(keys)
        masked = None if supports is None else MaskedPass(supports, *rows)
        # What stands between ours and TRL's method may ask for them itself.
        entropies = bool(options.get("compute_entropy")) or not host.__module__.startswith("trl.")
        with nullcontext() if masked is None else scoring_with(masked, entropies=entropies):
            scores, routed = self._routed(host, model, rows, keys, *args, **options)
        if masked is not None and not masked.done and any(completion for _, completion in keys):
            raise ReplayError(
                f"mismatch.sampling_mask: {type(self.trainer).__name__} scored a batch without TRL's fused head, where masks are "
                "replayed. Remove what overrides _get_per_token_logps_and_entropies, or mismatch.sampling_mask."
            )
        if trained and self.replayed is not None and torch.is_grad_enabled() >= self._has_gradients:
            self.replayed.update(routed if masked is not None or self.masking is None else ())
        return scores

    def _tables(self) -> list[RowTable]:
        """Return where to look for rows; a batch that is being made is sampled and recorded anew."""
        if self.batch is not None:
            return [self.batch.table]
        return self.tables.newest(training=self.trainer.model.training)

    def _take_engines_rows(self) -> None:
        """Take routes and masks of the batch from the engine's records of it, if it has sampled since they were taken."""
        batch = self.batch
        if batch is None or batch.joining or batch.taken == len(batch.records):
            return
        batch.taken = len(batch.records)
        keys = [row_key(record.prompt_ids, record.response_ids) for record in batch.records]
        if self.masking is not None:
            batch.table.add(keys, supports=[support_of(record, self._vocabulary) for record in batch.records])
        if self.routing is not None and self.routing.config.mode == "R3":
            shape = self.routing.layout.shape
            known = []
            routes = []
            for key, record in zip(keys, batch.records, strict=True):
                trace = record.routing
                if trace is None:
                    trace = unrouted(record, layers=shape.layers, top_k=shape.top_k, num_experts=shape.num_experts)
                if is_of(trace, record.token_ids):
                    known.append(key)
                    routes.append(trace)
            batch.table.add(known, routes=share(routes, [tokens_of(key)[0] for key in known]))

    @property
    def _vocabulary(self) -> int:
        assert self.run.checked is not None and self.run.checked.masks is not None  # masks are the engine's
        return self.run.checked.masks.vocabulary

    def _supports_of(self, keys: Sequence[RowKey]) -> list[TokenSupport] | None:
        """Return the masks of a pass; None of other rows.

        In a pass over a whole batch that is being scored, rows of other tokens are bad if some rows are known, and get empty
        masks.
        """
        if self.masking is None:
            return None
        found = find_in((table.supports for table in self._tables()), keys)
        if self.batch is not None and self.batch.has_size_of(len(keys)) and any(one is not None for one in found):
            found = [self._no_support(key) if one is None else one for key, one in zip(keys, found, strict=True)]
        known = [one for one in found if one is not None]
        return known if len(known) == len(keys) else None

    def _no_support(self, key: RowKey) -> TokenSupport:
        return TokenSupport.empty(len(tokens_of(key)[1]), self._vocabulary)

    def _no_routes(self, key: RowKey) -> RoutingTrace:
        assert self.routing is not None
        shape, (prompt, completion) = self.routing.layout.shape, tokens_of(key)
        return RoutingTrace.unrouted(
            [*prompt, *completion], layers=shape.layers, top_k=shape.top_k, num_experts=shape.num_experts, version=0
        )

    def _routed(
        self, host: Host, model: Any, rows: Rows, keys: Sequence[RowKey], batch_size: int | None = None, **options: Any
    ) -> tuple[Scores, Sequence[RowKey]]:
        """Return scores, and the rows of which they are under their routes."""
        routing, options = self.routing, {"batch_size": batch_size, **options}
        reference = self.is_reference(model)
        if routing is None or (reference and not routing.config.reference):
            return cast("Scores", host(model, *rows, **options)), keys if routing is None else []
        routes = self._routes_of(keys)
        if self.batch is not None and routing.config.mode == "R2" and None in routes:
            if not reference:
                return self._recorded(host, model, rows, keys, **options), keys
            self._refuse_early_reference(model)
            with forked_rng(rows[0].device):  # TRL takes no such pass
                self._recorded(host, self.trainer.model, rows, keys, **options)
            routes = self._routes_of(keys)
        split = REFERENCE if reference else self.run.split
        replayed = [key for key, trace in zip(keys, routes, strict=True) if trace is not None]
        if not replayed:
            # Somebody's own pass over other tokens, which must not be given the experts of the batch's tokens.
            routing.others[split] += 1
            return cast("Scores", host(model, *rows, **options)), []
        traces = [self._no_routes(key) if trace is None else trace for key, trace in zip(keys, routes, strict=True)]
        before = routing.forwards
        scores = routing.replay(host, model, rows, traces, split, **options)
        return scores, replayed if routing.forwards > before else []

    def _routes_of(self, keys: Sequence[RowKey]) -> list[RoutingTrace | None]:
        return find_in((table.routes for table in self._tables()), keys)

    def _recorded(self, host: Host, model: Any, rows: Rows, keys: Sequence[RowKey], **options: Any) -> Scores:
        """Score rows by the model's own routes, which are known of them from here on."""
        assert self.routing is not None and self.batch is not None
        scores, routes = self.routing.record(host, model, rows, self.run.step, **options)
        self.batch.table.add(keys, routes=routes)
        self.batch.recorded += 1
        return scores

    # One loss.

    @contextmanager
    def of_loss(self, inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Know the bad rows of a micro-batch, and that its rows are replayed, while its loss is computed.

        Yields the inputs, in which no bad row has numbers of its own.

        Args:
            inputs: What `_compute_loss` is given.

        Raises:
            ReplayError: A row was not replayed.
        """
        keys = row_keys(*rows_of_batch(inputs)) if self.sections or self.remembered else []
        bad = self._are_bad(keys)
        if bool(bad.any()):
            inputs = dict(inputs)
            take_out(inputs, bad.to(inputs["completion_ids"].device))
        self.replayed, self._has_gradients, self.passes = set(), torch.is_grad_enabled(), []
        try:
            yield inputs
            if self.sections and not self.replayed.issuperset(keys):
                raise self.refusal()
        finally:
            self.replayed = self.passes = None

    def refusal(self) -> ReplayError:
        """Return the error for a loss whose rows were not replayed."""
        return ReplayError(
            f"{self.sections}, but the loss was computed without a replayed forward pass over the micro-batch's tokens: "
            "something overrides _compute_loss or _get_per_token_logps_and_entropies, or gives them tokens that neither of the "
            f"last two steps has. Remove it, or {self.sections}."
        )

    def are_bad(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return which rows of a micro-batch are bad `[B]`, bool."""
        completions = inputs["completion_ids"]
        if not self.remembered:
            return torch.zeros(len(completions), dtype=torch.bool, device=completions.device)
        return self._are_bad(row_keys(*rows_of_batch(inputs))).to(completions.device)

    def _are_bad(self, keys: Sequence[RowKey]) -> Tensor:
        judged = find_in((table.bad for table in self._tables()), keys)
        bad = [key in self.remembered if one is None else one for key, one in zip(keys, judged, strict=True)]
        return torch.tensor(bad, dtype=torch.bool)

    # A batch that has been scored.

    def settle(self, output: Mapping[str, Any], bad: BadRows, again: Callable[[], Tensor]) -> None:
        """Know routes and masks of every row of a batch that has been scored; rows of other tokens are bad.

        Args:
            output: The batch.
            bad: Takes the bad rows, which the model routes itself.
            again: Takes a pass of our own over the batch.

        Raises:
            RoutingError: There are routes of none of the rows.
            RecordError: There are masks of none of the rows.
        """
        batch = self.batch
        assert batch is not None
        if not self.sections:
            return
        self._take_engines_rows()
        keys, table = row_keys(*rows_of_batch(output)), batch.table
        if self.routing is not None:
            if self.routing.config.mode == "R2":
                if None in self._routes_of(keys):
                    # TRL took no pass over the batch's tokens that R2 could record.
                    batch.policy = again()
                self.routing.others[self.run.split] += max(batch.recorded - 1, 0)
            self._judge(keys, table.routes, bad, RoutingError(_OTHER_TOKENS.format("routes", self._routing_section)))
            table.add(keys, routes=[self._no_routes(key) for key in keys])
        if self.masking is not None:
            self._judge(keys, table.supports, bad, RecordError(_OTHER_TOKENS.format("masks", MASKS)))
            table.add(keys, supports=[self._no_support(key) for key in keys])

    def _judge(self, keys: Sequence[RowKey], known: Mapping[RowKey, Any], bad: BadRows, error: MismatchError) -> None:
        """Call rows bad that are not known; raise the error if none is."""
        unknown = [row for row, key in enumerate(keys) if key not in known]
        if len(unknown) == len(keys):
            raise error
        for row in unknown:
            bad.add(row, "tokens", f"row {row}: {error}")

    def supports_of(self, output: Mapping[str, Any]) -> list[TokenSupport]:
        """Return the masks of each row of a batch that is settled."""
        assert self.batch is not None
        return [self.batch.table.supports[key] for key in row_keys(*rows_of_batch(output))]

    def judge(self, output: Mapping[str, Any], bad: BadRows) -> None:
        """Know which rows of a batch are bad; rows of the same tokens are too, because a pass cannot tell them apart."""
        assert self.batch is not None
        keys = row_keys(*rows_of_batch(output))
        include_equal_rows(bad, keys)
        self.batch.table.judge(keys, bad.faults)
        self.remembered.add(keys[row] for row in bad.faults)

    # Models.

    def is_reference(self, model: Any) -> bool:
        """Tell whether a pass is the reference policy's: a model of its own, or the trained one without its adapter."""
        if self.trainer.ref_model is not None:
            return model is self.trainer.ref_model
        if not is_peft_available():
            return False
        from peft.tuners.tuners_utils import BaseTunerLayer

        layers = (layer for layer in model.modules() if isinstance(layer, BaseTunerLayer))
        return any(layer.disable_adapters or "ref" in layer.active_adapters for layer in layers)

    def _is_trained(self, model: Any) -> bool:
        """Tell whether a pass is of the model that is trained, however it is wrapped."""
        if model is self.trainer.model:
            return True
        unwrap = self.trainer.accelerator.unwrap_model
        given, trained = (unwrap(wrapped, keep_torch_compile=False) for wrapped in (model, self.trainer.model))
        # A compiled model within DDP is left compiled.
        return getattr(given, "_orig_mod", given) is getattr(trained, "_orig_mod", trained)

    def _refuse_early_reference(self, model: Any) -> None:
        if model is not self.trainer.ref_model:
            raise ConfigError(
                "mismatch.routing mode='R2' with reference=True and an adapter, in a setup where TRL takes no old-logprob pass: "
                "the reference is scored before any pass of the policy that could be recorded. Set reference=False, or "
                "mode='R3'."
            )


def scored_again(trainer: Any, output: Mapping[str, Any], *, training: bool) -> Tensor:
    """Return the trainer's log-probabilities `[B, T]` of a batch by a pass of our own, which moves no random number of TRL's."""
    known = inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters
    # The batch size of TRL's own pass, because another one can round differently.
    size = trainer.args.per_device_train_batch_size if training else trainer.args.per_device_eval_batch_size
    images = {name: output[name] for name in known if name in output}
    with torch.no_grad(), forked_rng(trainer.accelerator.device):
        logps: Tensor = trainer._get_per_token_logps_and_entropies(
            trainer.model, *rows_of_batch(output), batch_size=size, **images
        )[0]
    return logps
