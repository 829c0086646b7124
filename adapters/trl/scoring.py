"""The scoring passes of TRL's model, each under the routes and over the sampling masks that belong to its tokens.

R3: the sampler's routes travel with the completions, as `inputs["routing"]`, through TRL's shuffling and splitting, and are
replayed in the old-logprob pass and in every update. R2: the trainer's old-logprob pass records them instead. Masks travel the
same way, as `inputs["sampling_mask"]`. A pass is known by its tokens, never by its place.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from mismatch_ext.adapters.trl.bad_rows import BAD, Remembered, as_constants, mark_of, take_out
from mismatch_ext.adapters.trl.overridden import overridden
from mismatch_ext.adapters.trl.passes import RolloutPass, Scored
from mismatch_ext.adapters.trl.replay import (
    RowKey,
    Rows,
    ScoreReplay,
    Scores,
    row_key,
    row_keys,
    share,
    with_bad_rows,
)
from mismatch_ext.adapters.trl.sampling_mask import MaskedPass, RowMask, masks_of, masks_of_rows, without_masks
from mismatch_ext.patches.trl.fused_head import scoring_with
from torch import Tensor
from transformers.utils import is_peft_available
from trl import GRPOTrainer

from mismatch_ext.config import SamplingMaskConfig
from mismatch_ext.errors import ConfigError, RecordError, ReplayError, RoutingError
from mismatch_ext.rng import forked_rng
from mismatch_ext.rollout import RolloutRecord, unrouted
from mismatch_ext.routing import RoutingTrace
from mismatch_ext.routing.replay import REFERENCE

if TYPE_CHECKING:
    from mismatch_ext.adapters.trl.run import TrlRun

OLD, ROLLOUT = "old_per_token_logps", "sampling_per_token_logps"
"""TRL's keys of the trainer's log-probabilities at sampling time, and of the engine's."""
ROUTES, MASKS = "routing", "sampling_mask"
"""Keys of TRL's inputs under which routes and masks travel."""
Host = Callable[..., Any]
_OTHER_TOKENS = (
    "the {what} {when} are of other tokens than those that are trained on ({section}): rows moved or tokens changed between "
    "sampling and the loss. Move inputs[{key!r}] with the other inputs, and leave prompt_ids, completion_ids and their masks as "
    "they were sampled."
)
_IN_LOSS = "that traveled with the micro-batch"
_OF_MASKS = {"what": "masks", "section": "mismatch.sampling_mask", "key": MASKS}


class Scoring:
    """The passes of one trainer's model."""

    def __init__(self, run: TrlRun) -> None:
        self.run, self.trainer = run, run.trainer
        self.routing: ScoreReplay | None = None  # records and replays routes, with the section
        self.masking: SamplingMaskConfig | None = run.block.sampling_mask
        self.rollouts: RolloutPass | None = None  # the batch that is scored, or the micro-batch whose loss is computed
        self.passes: list[Scored] | None = None  # takes the host's passes while they are kept
        self.ours = False  # whether a pass is our own, which nothing that is trained on is made of
        self.remembered = Remembered()
        # Those of bad rows in the micro-batch whose loss is computed; None outside of a loss.
        self.marks: frozenset[int] | None = None

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

    def score(
        self,
        host: Host,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        *args: Any,
        **options: Any,
    ) -> Scores:
        """Score tokens as TRL does, under the routes and over the masks that were recorded for them, bad rows as constants."""
        rows = (input_ids, attention_mask, logits_to_keep)
        scores = self._score(host, model, rows, *args, **options)
        if self.ours or self.is_reference(model) or not self._is_trained(model):
            return scores
        marks = self.marks
        if marks is None:
            # Outside of a loss, TRL scores new rows without gradients, and a user may train on rows of any batch.
            marks = self.remembered.all() if torch.is_grad_enabled() else frozenset()
        return as_constants(scores, _are_marked(row_keys(*rows), marks)) if marks else scores

    @contextmanager
    def knowing_bad_rows(self, inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Know the bad rows of a micro-batch, or of a part that a user has made of it, while its loss is computed.

        Yields the inputs, in which no bad row has numbers of its own.
        """
        marks = self._marks_in(inputs)
        with overridden(self, marks=marks | (self.marks or frozenset())):
            if self.marks:
                inputs = dict(inputs)
                take_out(inputs, self.are_bad(inputs))
            yield inputs

    def _marks_in(self, inputs: Mapping[str, Any]) -> frozenset[int]:
        """Return the marks of bad rows that have traveled with a micro-batch; of all that the run remembers if none have."""
        column = inputs.get(BAD)
        if column is None:
            return self.remembered.all()
        if len(column) != len(inputs["completion_ids"]):
            raise ConfigError(
                f"inputs[{BAD!r}] has {len(column)} rows, and the micro-batch {len(inputs['completion_ids'])}: something between "
                "_generate_and_score_completions and the loss took, dropped or repeated rows without it. Treat it as the other "
                "inputs, row by row, or leave it out."
            )
        marks = frozenset(column.tolist()) - {0}
        if marks and not marks <= {mark_of(key) for key in row_keys(*rows_of_batch(inputs))}:
            raise ConfigError(
                f"inputs[{BAD!r}] marks a bad row that the micro-batch does not have: something between "
                "_generate_and_score_completions and the loss moved rows without it, or changed their tokens. Treat it as the "
                "other inputs, row by row, or leave it out."
            )
        return marks

    def are_bad(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return which rows of a micro-batch are bad `[B]`, bool."""
        completions = inputs["completion_ids"]
        if not self.marks:
            return torch.zeros(len(completions), dtype=torch.bool, device=completions.device)
        return _are_marked(row_keys(*rows_of_batch(inputs)), self.marks).to(completions.device)

    def _score(self, host: Host, model: Any, rows: Rows, *args: Any, **options: Any) -> Scores:
        batch = self.rollouts
        if batch is None or not self.sections:
            # Without a batch it is somebody's own pass, over tokens without routes and masks.
            return cast("Scores", host(model, *rows, *args, **options))
        keys, reference = row_keys(*rows), self.is_reference(model)
        masks = None if self.masking is None else self._masks_of(batch, keys)
        masked = None if masks is None else MaskedPass(masks, *rows)
        # What stands between ours and TRL's method may ask for them itself.
        entropies = bool(options.get("compute_entropy")) or not host.__module__.startswith("trl.")
        with nullcontext() if masked is None else scoring_with(masked, entropies=entropies):
            scores, routed = self._routed_score(host, model, rows, batch, reference, *args, **options)
        if masked is not None and not masked.done and any(completion for _, completion in keys):
            raise ReplayError(
                f"mismatch.sampling_mask: {type(self.trainer).__name__} scored a batch without TRL's fused head, where masks are "
                "replayed. Remove what overrides _get_per_token_logps_and_entropies, or mismatch.sampling_mask."
            )
        replayed = routed and (masked is not None or self.masking is None)
        if not self.ours and not reference and self._is_trained(model):
            if not replayed:
                batch.others_with_gradients |= torch.is_grad_enabled()
            else:
                batch.replayed.update(keys)
                if torch.is_grad_enabled():
                    batch.replayed_with_gradients.update(keys)
        return scores

    def _routed_score(
        self,
        host: Host,
        model: Any,
        rows: Rows,
        batch: RolloutPass,
        reference: bool,
        batch_size: int | None = None,
        **options: Any,
    ) -> tuple[Scores, bool]:
        """Return scores, and whether they are under the routes of their tokens."""
        routing, options = self.routing, {"batch_size": batch_size, **options}
        if routing is None or (reference and not routing.config.reference):
            return cast("Scores", host(model, *rows, **options)), routing is None
        self._take_engines_routes(batch)
        routes = batch.routes_of(*rows)
        if routes is None and batch.has_size_of(len(rows[0])) and routing.config.mode == "R3":
            routes = self._partly_known_routes(batch, rows)
        if routes is None and batch.fresh and routing.config.mode == "R2":
            if not reference:
                scores, recorded = routing.record(host, model, rows, self.run.step, **options)
                batch.routes.append(recorded)
                return scores, True
            self._refuse_early_reference(model)
            with forked_rng(rows[0].device):  # TRL takes no such pass
                batch.routes.append(routing.record(host, self.trainer.model, rows, self.run.step, **options)[1])
            routes = batch.routes_of(*rows)
        split = REFERENCE if reference else self.run.split
        if routes is None:
            # Somebody's own pass over other tokens, which must not be given the experts of the batch's tokens.
            routing.others[split] += 1
            return cast("Scores", host(model, *rows, **options)), False
        before = routing.forwards
        scores = routing.replay(host, model, rows, routes, split, **options)
        return scores, routing.forwards > before

    def _partly_known_routes(self, batch: RolloutPass, rows: Rows) -> list[RoutingTrace] | None:
        """Return the routes of a pass over the batch in which some rows are of other tokens; None if all rows are.

        Rows of other tokens are bad, and the model routes them itself.
        """
        assert self.routing is not None
        if batch.joining or not batch.routes:
            return None
        return with_bad_rows(batch.routes[0], rows, self.routing.layout.shape)

    def loss(self, host: Host, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute a loss as TRL does, under the routes and masks that traveled with the micro-batch, without its bad rows."""
        with self.knowing_bad_rows(inputs) as known:
            if not self.sections:
                return host(model, known, *args, **kwargs)
            with overridden(self, rollouts=self._micro_batch(known)):
                loss = host(model, known, *args, **kwargs)
                self.expect_replayed(known, every=False)  # a user may have dropped rows
            return loss

    def expect_replayed(self, inputs: Mapping[str, Any], *, every: bool) -> None:
        """Refuse a loss whose own rows, every one or at least one, were not scored under their routes and masks.

        If it is not known that every row of TRL's own loss was, a pass with gradients over other rows is refused too.
        """
        batch, sections = self.rollouts, self.sections
        if batch is None or batch.fresh or not sections:
            return
        replayed = batch.replayed_with_gradients if torch.is_grad_enabled() else batch.replayed
        found = [key in replayed for key in row_keys(*rows_of_batch(inputs))]
        if not (all(found) if every else any(found)):
            raise ReplayError(
                f"{sections}, but the loss was computed without a replayed forward pass over the micro-batch's tokens: "
                f"something overrides _get_per_token_logps_and_entropies, or gives it other tokens. Remove it, or {sections}."
            )
        if batch.others_with_gradients and not (every or batch.trl_loss_checked):
            raise ReplayError(
                f"{sections} with {type(self.trainer).__name__}, which scored other rows than the micro-batch's with gradients: "
                "TRL's own loss may be made of them, without replay. Score them under torch.no_grad(), or put your class first, "
                "class T(Yours, MismatchGRPOTrainer), and call super()._compute_loss, which is then checked apart from them."
            )
        batch.trl_loss_checked |= every and torch.is_grad_enabled()

    @property
    def sections(self) -> str:
        """The sections that are replayed in a loss; empty if none is."""
        routes = "" if self.routing is None else self._of_routes["section"]
        return " and ".join(filter(None, (routes, "" if self.masking is None else _OF_MASKS["section"])))

    @property
    def _of_routes(self) -> dict[str, str]:
        assert self.routing is not None
        return {"what": "routes", "section": f"mismatch.routing.mode={self.routing.config.mode!r}", "key": ROUTES}

    def _micro_batch(self, inputs: Mapping[str, Any]) -> RolloutPass:
        """Return what traveled with a micro-batch."""
        rows, found = rows_of_batch(inputs), RolloutPass(fresh=False)
        if self.routing is not None:
            found.routes = [_traveled(inputs, **self._of_routes)]
            if found.routes_of(*rows) is None:
                raise RoutingError(_OTHER_TOKENS.format(when=_IN_LOSS, **self._of_routes))
        if self.masking is not None:
            found.masks = _traveled(inputs, **_OF_MASKS)
            if masks_of_rows(found.masks, row_keys(*rows)) is None:
                raise RecordError(_OTHER_TOKENS.format(when=_IN_LOSS, **_OF_MASKS))
        return found

    def expect_micro_batch(self) -> None:
        """Refuse a loss that is trained on and did not come through `loss`: its passes would have neither routes nor masks."""
        if not self.sections or (self.rollouts is not None and not self.rollouts.fresh):
            return
        if self.trainer.model.training and torch.is_grad_enabled():
            raise ReplayError(
                f"mismatch.routing or mismatch.sampling_mask with {type(self.trainer).__name__}, which calls _compute_loss "
                "without super().compute_loss(model, inputs): neither routes nor masks would be replayed. Call that, or remove "
                "both."
            )

    # A batch that has been scored.

    def batch_routes(
        self, batch: RolloutPass, output: Mapping[str, Any], again: Callable[[], Tensor]
    ) -> list[RoutingTrace]:
        """Return the routes of a batch that has been scored, one trace for each row; `again` takes a pass of our own."""
        routing = self.routing
        assert routing is not None
        self._take_engines_routes(batch)
        rows, recorded = rows_of_batch(output), routing.config.mode == "R2"
        if (routes := batch.routes_of(*rows)) is None and recorded:
            # TRL took no pass over the batch's tokens that R2 could record.
            batch.policy = again()
            routes = batch.routes_of(*rows)
        if routes is None and not recorded:
            routes = self._partly_known_routes(batch, rows)
        if routes is None:
            raise RoutingError(_OTHER_TOKENS.format(when="recorded while the batch was sampled", **self._of_routes))
        if recorded:
            routing.others[self.run.split] += max(len(batch.routes) - 1, 0)
        return routes

    def batch_masks(
        self, batch: RolloutPass, output: Mapping[str, Any], records: Sequence[RolloutRecord | None]
    ) -> list[RowMask]:
        """Return the masks of each row of a batch that has been scored; a row without a record gets empty ones."""
        assert self.run.checked is not None and self.run.checked.masks is not None
        vocabulary = self.run.checked.masks.vocabulary
        # Of rows with the same tokens the first one's, as in passes.
        known = {mask.row: mask for mask in reversed(masks_of(batch.records, vocabulary))}
        keys = row_keys(*rows_of_batch(output))
        masks: list[RowMask] = []
        for key, record in zip(keys, records, strict=True):
            if record is None:
                masks.append(without_masks(key, vocabulary))
            else:
                masks.append(known[row_key(record.prompt_ids, record.response_ids)])
        if masks_of_rows(masks, keys) is None:
            raise RecordError(_OTHER_TOKENS.format(when="of the engine's rollouts", **_OF_MASKS))
        return masks

    def expect_old(self, batch: RolloutPass, output: Mapping[str, Any]) -> None:
        """Refuse old log-probabilities that are of no pass under the routes and over the masks of their rows."""
        name = next((name for name in (OLD, "old_logps") if output.get(name) is not None), None)  # GRPO's and RLOO's
        if name is None or not self.sections:
            return
        # A completion that was turned into padding since is not trained on.
        if not all(key in batch.replayed for key in row_keys(*rows_of_batch(output)) if key[1]):
            raise RecordError(
                f"{self.sections}: {name} come from no replayed pass of the trained model over the batch's tokens. Score them "
                "with _get_per_token_logps_and_entropies, whose batch_size takes less memory, and only with the trained model. "
                "A class that adds rows of an earlier batch has to be first: class T(Yours, MismatchGRPOTrainer). Or remove "
                f"{self.sections}."
            )

    def _take_engines_routes(self, batch: RolloutPass) -> None:
        """Take the routes of a batch from the engine's records of it; a user may have sampled more since they were taken."""
        assert self.routing is not None
        if batch.joining or self.routing.config.mode != "R3" or len(batch.records) <= sum(map(len, batch.routes)):
            return
        routes, shape = [], self.routing.layout.shape
        for record in batch.records:
            trace = record.routing
            if trace is None:
                trace = unrouted(record, layers=shape.layers, top_k=shape.top_k, num_experts=shape.num_experts)
            routes.append(trace)
        batch.routes = [share(routes, [record.prompt_ids.tolist() for record in batch.records])]

    def _masks_of(self, batch: RolloutPass, keys: Sequence[RowKey]) -> list[RowMask] | None:
        """Return the masks of a pass over rows of a micro-batch, or of a batch that is being scored; None of other rows.

        In a pass over a whole batch that is being scored, rows of other tokens are bad if some rows are known, and get empty
        masks.
        """
        if batch.joining:
            return None
        if batch.masks:
            return masks_of_rows(batch.masks, keys)
        assert self.run.checked is not None and self.run.checked.masks is not None
        vocabulary = self.run.checked.masks.vocabulary
        of_batch = masks_of(batch.records, vocabulary)
        masks = masks_of_rows(of_batch, keys)
        if masks is None and batch.has_size_of(len(keys)):
            masks = masks_of_rows(of_batch, keys, vocabulary)
        return masks

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


def _traveled(inputs: Mapping[str, Any], *, section: str, key: str, what: str) -> Any:
    """Return the routes or masks of a micro-batch."""
    if key not in inputs:
        raise ReplayError(
            f"{section}, but the micro-batch has no {what} ({key!r}): something between _generate_and_score_completions and "
            "compute_loss dropped it. Pass it on with the other inputs."
        )
    return inputs[key]


def rows_of_batch(inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor, int]:
    """Return tokens and attention mask `[B, S]` of a batch as TRL scores it, and its completion positions."""
    tokens = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    return (
        tokens,
        torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
        inputs["completion_ids"].size(1),
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


def _are_marked(keys: Sequence[RowKey], marks: frozenset[int]) -> Tensor:
    """Return which rows of a scoring pass have one of these marks `[B]`, bool."""
    return torch.tensor([mark_of(key) in marks for key in keys], dtype=torch.bool)
