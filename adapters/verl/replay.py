"""Routing replay in verl's FSDP engine, by the two hooks with which verl's VeOmni engine replays.

R3: the rollout engine's routes come with the samples, in verl's field `routed_experts`. R2: the pass that computes old
log-probabilities records them and returns them under that name, so that verl's batch holds them for the update. Routes are
checked before any forward pass of a batch runs; then verl splits and shuffles them with their samples.

Shapes: B samples, T tokens of a sample, N tokens of a micro-batch, R rows of a forward pass on this rank, padding included, L MoE
layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeGuard

import numpy as np
import torch
import torch.distributed as dist
from mismatch_ext.adapters.transformers import routing as backend
from mismatch_ext.adapters.verl.bad_rows import (
    add_faults,
    bad_rows,
    is_judged,
    number_of,
    warn_of_first,
)
from mismatch_ext.adapters.verl.rollout.client import FIELD as VERSIONS
from mismatch_ext.adapters.verl.rollout.digests import proven, without_digests
from torch import Tensor, nn
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.utils.ulysses import (
    gather_outputs_and_unpad,
    get_ulysses_sequence_parallel_group,
    get_ulysses_sequence_parallel_rank,
    get_ulysses_sequence_parallel_world_size,
    slice_input_tensor,
)

from mismatch_ext.bad_rows import FEW
from mismatch_ext.config import RoutingConfig
from mismatch_ext.errors import ReplayError, RoutingError
from mismatch_ext.ranks import WORLD, agree, together
from mismatch_ext.routing import RoutingTrace
from mismatch_ext.routing.ingest import check_ids
from mismatch_ext.routing.replay import REFERENCE, RouteReplay
from mismatch_ext.routing.tokens import PADDING, TokenRows
from mismatch_ext.routing.trace import Span, expect_weights

FIELD = "routed_experts"
TOKENS = "routed_tokens"
"""Field of the token ids whose routes R2 recorded; R3's routes carry digests of theirs."""
NATIVE = "mismatch_native"
"""Entry of a batch that asks for a pass without replay, to measure the gap that replay closes."""
SAMPLES = "mismatch_samples"
"""Field of a batch that is replayed `[B, 5]`: how many tokens of a sample have a route, from the first on; whether its tokens are
counted; whether its routes are of the present weights; the number of its fault, 0 if it has none; its own number in the batch."""
MARKED = 64
"""Rows of a sample's routes, spread over it, by which an update knows those that it proved before."""
TRAIN = "train"
"""Split of all passes of the policy: verl's engines do not validate."""
ALTERED = (
    "request {}: its token ids are others than those that its routes were recorded of ({} of {} samples), from token {} on: text "
    "was tokenized again, input_ids were changed without routed_experts, or routes are another turn's or sample's. Give an "
    "update the ids that the engine was given and sampled, and the routes that came with them{}."
)


@dataclass(frozen=True, kw_only=True, eq=False)
class PassLayout:
    """How verl's engine lays out the tokens of a micro-batch: packed in one row, which ranks may share, or padded."""

    offsets: Tensor  # where each sample begins among the N tokens `[B + 1]`
    padding: int | None  # rows after a packed row; None for a padded batch

    @classmethod
    def of(cls, micro_batch: Any, output_args: Any) -> PassLayout:
        """Return the layout of the pass whose inputs verl has prepared."""
        return cls(offsets=micro_batch["input_ids"].offsets(), padding=output_args.get("pad_size"))

    @cached_property
    def sample(self) -> Tensor:
        """Sample of each token `[N]`."""
        lengths = self.offsets.diff()
        return torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)

    @cached_property
    def position(self) -> Tensor:
        """Position of each token in its sample `[N]`."""
        return torch.arange(len(self.sample), device=self.sample.device) - self.offsets[self.sample]

    @property
    def shared(self) -> bool:
        """Whether ranks share the row, each with an equal piece."""
        return self.padding is not None and get_ulysses_sequence_parallel_world_size() > 1

    @cached_property
    def _real(self) -> Tensor:
        lengths = self.offsets.diff()
        return torch.arange(int(lengths.max()), device=lengths.device) < lengths[:, None]

    def rows(self, values: Tensor, fill: int) -> Tensor:
        """Lay the tokens' values `[N, ...]` out as verl lays `input_ids` out `[R, ...]`."""
        if self.padding is None:
            padded = values.new_full((*self._real.shape, *values.shape[1:]), fill)
            padded[self._real] = values
            return padded.flatten(0, 1)
        if self.padding:
            values = torch.cat([values, values.new_full((self.padding, *values.shape[1:]), fill)])
        return slice_input_tensor(values, dim=0, padding=False) if self.shared else values

    def tokens(self, rows: Tensor) -> Tensor:
        """Return the values of the tokens `[N, ...]` from those of the rows; ranks that share them must all call this."""
        if self.padding is None:
            return rows.view(*self._real.shape, *rows.shape[1:])[self._real]
        if self.shared and rows.is_floating_point():
            rows = gather_outputs_and_unpad(rows, gather_dim=0)
        elif self.shared:  # as bytes, because NCCL has no 16-bit integers
            rows = gather_outputs_and_unpad(rows.contiguous().view(torch.uint8), gather_dim=0).view(rows.dtype)
        return rows[: int(self.offsets[-1])]


Proof = tuple[int, bool]
"""What `proven` says of a sample's routes: how many rows are of its tokens, and whether the next is of others."""


@dataclass(frozen=True)
class _Sample:
    """A sample as its routes are checked."""

    array: Tensor | None  # its routes as they came
    tokens: int
    proof: Proof
    needed: int  # rows that its loss depends on
    name: str
    checks_ids: bool  # False if another rank or pass does


class EngineReplay(RouteReplay):
    """Records or replays routing around an engine's forward passes; `sharing` ranks have a piece of a pass's rows each.

    Ranks refuse routes together: one that failed alone would leave the others waiting for it in a collective.
    """

    def __init__(self, config: RoutingConfig, model: nn.Module, seed: int, sharing: int = 1) -> None:
        super().__init__(config, backend, model, seed=seed, ranks=WORLD)
        self._model, self._sharing = model, sharing
        self.weight_version: int | None = None  # version that the rollout engine was sent last
        self.takes_older = False  # whether rollouts may be of older weights than these
        self.moved = False  # whether an update has moved the weights since the rollout engine was sent them
        self._faults: dict[int, str] = {}  # what is wrong with samples of the batch that are bad
        # Of each sample of the batch, in this process's memory: verl's micro-batches would carry them whole to each device.
        self._routes: list[Tensor | None] = []
        self._reports = False  # whether a rank has such samples, so that all ranks return the field of faults
        self._marks: list[int | None] = []  # of each sample of the batch what `_mark` returns; None without routes
        # What `proven` says of samples whose ids the last judged pass has checked, by their marks: updates need neither again.
        self._judged: dict[int, Proof] = {}
        self._split: str | None = None  # of the batch that is recorded or replayed
        self._records = False
        self._prepared = 0  # samples of the batch whose passes have begun
        self._opened: ExitStack | None = None  # of the micro-batch that runs
        self._expected: tuple[PassLayout, TokenRows] | None = None
        self._recording: Any = None
        self._present: Tensor | None = None

    @contextmanager
    def batch(self, data: Any, *, rank: int, forward_only: bool, reference: bool) -> Iterator[Any]:
        """Check the routes of a mini-batch on all ranks together, and give the batch that verl is to run in this context.

        If the pass is judged, samples whose routes are wrong are bad, and the model routes them itself.
        """
        if tu.get_non_tensor_data(data=data, key=NATIVE, default=False) or (reference and not self.config.reference):
            yield data
            return
        records = self.config.mode == "R2" and forward_only and not reference
        run = data.exclude(FIELD, TOKENS)
        judged = self.config.mode == "R3" and not reference and is_judged(data, forward_only)
        self._faults = {}
        with together(WORLD, flags=2) as flags:
            if judged:
                self._judged = {}
            proofs = self._prove(data)
            if judged:
                others = {}
            elif self.config.mode == "R3":
                others = other_than_recorded(proofs, needed(data))
            else:  # routes that came with altered samples would be replaced by those that are recorded of other tokens
                others = altered(data) if not records or data.get(FIELD, None) is not None else {}
            check_tokens(others, data, rank, forward_only)
            if not records and not others:
                run[SAMPLES] = self.ingest(data, rank, proofs, judged=judged)
            flags.here[:] = [bool(others), bool(self._faults)]
        any_others, self._reports = flags.anywhere
        if self._reports and not any_others:
            self._share_faults(run[SAMPLES])
        if judged:
            rows = zip(self._marks, proofs, run[SAMPLES][:, 3].tolist(), strict=True)
            self._judged = {mark: proof for mark, proof, fault in rows if mark is not None and not fault}
        warn_of_first(self._faults)
        if any_others:
            # Somebody asks for scores of altered samples, which are not trained on: the model routes them itself.
            self.others[TRAIN] += 1
            yield data
            return
        # Where rollouts are of older weights, routes are compared with those of the weights that were sent: before an update.
        drifted = self.takes_older and self.moved and not forward_only
        self._split, self._records = REFERENCE if reference or drifted else TRAIN, records
        self._prepared = 0
        try:
            # The pass meets other ranks in collectives of its own: a rank whose pass fails must not meet them here.
            yield run
            with together(WORLD):
                if self._prepared < len(data):
                    raise ReplayError(
                        f"mismatch.routing: verl's engine ran {len(data) - self._prepared} of {len(data)} samples without its "
                        "forward_step and prepare_model_inputs, where routes are replayed and recorded. Remove what overrides "
                        "them, or mismatch.routing."
                    )
        finally:
            self._split = None
            self._routes = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run a micro-batch in this context, which closes what `inputs` opens; raises RoutingError."""
        # A batch that is neither recorded nor replayed must not find what an earlier one has left.
        self._expected = self._recording = None
        if self._split is None:
            yield
            return
        try:
            with ExitStack() as self._opened:
                yield
        finally:
            self._opened = None
        if self._recording is not None:
            self.others[TRAIN] += len(self._recording.passes) - 1

    def inputs(self, micro_batch: Any, output_args: Any) -> None:
        """Begin to record or replay the pass whose inputs verl has prepared."""
        if self._opened is None:
            return
        layout = PassLayout.of(micro_batch, output_args)
        self._prepared += len(layout.offsets) - 1
        starts = layout.rows(layout.position == 0, False)
        starts[:1] = True  # the model sees the first token of a rank's piece as the start of a sequence
        ids = layout.rows(micro_batch["input_ids"].values().to(torch.int32), PADDING)
        self._expected = layout, TokenRows(ids=ids, starts=starts)
        if self._records:
            self._recording = self._opened.enter_context(backend.record_routing(self._model))
            return
        recorded, counted, present, _, _ = micro_batch[SAMPLES][layout.sample].unbind(1)
        experts = self.piece(layout, micro_batch[SAMPLES][:, 4].tolist()).to(ids.device)
        trace = RoutingTrace(
            parts=(experts if experts.dtype == torch.uint8 else experts.view(torch.uint16),),
            layers=self.layout.layers,
            num_experts=self.layout.num_experts,
            tokens=ids,
            starts=starts,
        )
        mask = layout.rows(layout.position < recorded, False)
        real, self._present = layout.rows(counted.bool(), False), layout.rows(present.bool(), False)
        assert self._split is not None
        self._opened.enter_context(self.replaying(self._model, trace, mask, real=real, split=self._split))

    def outputs(self, micro_batch: Any, model_output: dict[str, Any]) -> None:
        """Add to what a pass returns the routes that were recorded, and the faults of bad samples, sample by sample."""
        if self._expected is None:
            return
        layout, wanted = self._expected
        if self._reports:
            add_faults(model_output, micro_batch[SAMPLES][:, 3][layout.sample], layout.offsets)
        if self._recording is None:
            return
        passes = self._recording.passes
        own = [trace for trace in passes if _is_over(trace, wanted)]
        error = None
        if not own:
            error = RoutingError(
                f"R2 saw {len(passes)} forward passes of a micro-batch of {len(layout.offsets) - 1} samples, none of them over "
                "their tokens: something changes them on their way to the model, and their routes are not known."
            )
        if layout.shared:
            agree(error)
        elif error is not None:
            raise error
        experts = own[-1].experts
        # Neither torch's pickles nor its nested tensors take unsigned 16 bits.
        experts = layout.tokens(experts if experts.dtype == torch.uint8 else experts.view(torch.int16))
        ids = micro_batch["input_ids"].values().to(torch.int32)
        for name, values in ((FIELD, experts), (TOKENS, ids)):
            model_output[name] = torch.nested.nested_tensor_from_jagged(values, layout.offsets)

    def _checkable(self, trace: RoutingTrace, mask: Tensor) -> Tensor:
        """Keep the rows of the weights that score them: routes that older weights chose also differ by what was learned since."""
        return mask if self._present is None else mask & self._present

    def _prove(self, data: Any) -> list[Proof]:
        """Note the samples' marks, and return what `proven` says of each; what the judged pass has proven is not read again."""
        self._marks = [None] * len(data)
        if self.config.mode == "R2":  # its routes have no digests
            return [(0, False)] * len(data)
        proofs: list[Proof] = []
        for row, (array, ids) in enumerate(zip(routes(data), data["input_ids"].unbind(), strict=True)):
            if not _is_trace(array):
                proofs.append((0, False))
                continue
            mark = self._marks[row] = _mark(ids, array)
            known = self._judged.get(mark)
            proofs.append(proven(array, ids) if known is None else known)
        return proofs

    def ingest(
        self,
        data: Any,
        rank: int,
        proofs: Sequence[Proof],
        *,
        judged: bool = False,
    ) -> Tensor:
        """Check the routes of a batch's samples, keep them for `piece`, and return the field `SAMPLES` of a batch to run.

        `proofs` says of each sample what `proven` does. Ids that the last judged pass of this rank has checked are left to the
        device that replays them. If the pass is judged, samples whose routes are wrong are bad, unless that is true of all;
        otherwise raises RoutingError.
        """
        # Ranks that share rows have the same samples, and each checks the ids of its own part of them.
        sharing, place = get_ulysses_sequence_parallel_world_size(), get_ulysses_sequence_parallel_rank()
        samples = []
        kept: list[Tensor | None] = []
        arrays = routes(data)
        wrong: dict[int, RoutingError] = {}
        rows = zip(
            arrays,
            lengths(data),
            proofs,
            needed(data),
            versions(data),
            names(data, rank),
            bad_rows(data),
            strict=True,
        )
        for row, (array, tokens, proof, count, span, name, bad) in enumerate(rows):
            recorded, present, found = 0, True, None
            if bad:  # it has no part in any loss, and perhaps no routes of its own: the model routes it itself
                kept.append(None)
                samples.append((0, False, True, 0, row))
                continue
            try:
                is_mine = row % sharing == place
                is_checked = self._marks[row] in self._judged
                sample = _Sample(array, tokens, proof, count, name, checks_ids=is_mine and not is_checked)
                recorded, present, found = self._of_sample(sample, span, judged=judged)
            except RoutingError as error:
                if not judged:
                    raise
                wrong[row] = error
            kept.append(found)
            fault = number_of("routes") if row in wrong else 0
            samples.append((recorded, count > 0 and not fault, present, fault, row))
        self._faults = {row: str(error) for row, error in wrong.items()}
        self._routes = kept
        return torch.tensor(samples, dtype=torch.int64)

    def piece(self, layout: PassLayout, numbers: list[int]) -> Tensor:
        """Return the routes of this rank's rows of a pass `[R, L, K]`, from the numbers of its samples; 0 where there is none."""
        kind = torch.uint8 if self.layout.num_experts <= 256 else torch.int16
        tokens = torch.arange(len(layout.sample), device=layout.sample.device)
        places = layout.rows(tokens, -1).cpu()  # the token of each row, -1 at padding
        experts = torch.zeros((len(places), len(self.layout.layers), self.layout.top_k), dtype=kind)
        rows = (places >= 0).nonzero()[:, 0]
        places = places[rows]
        for number, begin in zip(numbers, layout.offsets.tolist(), strict=False):
            found = self._routes[number]
            if found is None:
                continue
            # The tokens ascend, and a rank may have some of a sample's, which follow one another.
            begins, ends = torch.searchsorted(places, torch.tensor([begin, begin + len(found)])).tolist()
            if begins < ends:
                start = int(places[begins]) - begin
                first, last = int(rows[begins]), int(rows[ends - 1]) + 1
                experts[first:last].copy_(found[start : start + last - first])
        return experts

    def _share_faults(self, samples: Tensor) -> None:
        """Take over the faults that ranks with the same samples have found, which all call this; raise if all are bad."""
        sharing = get_ulysses_sequence_parallel_group()
        if sharing is not None and get_ulysses_sequence_parallel_world_size() > 1:
            faults = samples[:, 3].to(get_device_id())
            dist.all_reduce(faults, op=dist.ReduceOp.MAX, group=sharing)
            samples[:, 3] = faults.cpu()
        faulty = samples[:, 3] > 0
        counted = samples[:, 1].bool() | faulty
        samples[faulty, :2] = 0
        with together(WORLD):
            if int(faulty.sum()) == int(counted.sum()) >= FEW:
                why = "the routes of all samples are wrong; another rank says why."
                raise RoutingError(next(iter(self._faults.values()), why))

    def _of_sample(self, sample: _Sample, span: Span | None, *, judged: bool) -> tuple[int, bool, Tensor | None]:
        """Return how many rows a sample has, whether they are of the present weights, and its routes `[rows, L, K]`."""
        if self.config.mode == "R2":
            return sample.tokens, True, self._routes_of(sample, sample.array, sample.tokens)
        rows, other = sample.proof
        if judged and other and rows < sample.needed:
            raise RoutingError(ALTERED.format(sample.name, 1, 1, rows, ""))
        recorded, found = self._recorded(sample)
        if not recorded:
            return 0, True, None
        first = expect_weights(span, self.weight_version, sample.name, older=self.takes_older)
        is_present = self.weight_version is None or first == self.weight_version
        return recorded, not self.takes_older or is_present, found

    def _recorded(self, sample: _Sample) -> tuple[int, Tensor | None]:
        """Return an engine's routes as verl hands them on: rows that are not of these tokens come last, and have no loss."""
        array, tokens = sample.array, sample.tokens
        if not _is_trace(array):
            return tokens, self._routes_of(sample, array, tokens)  # says what is wrong with it
        if len(array) not in (tokens, tokens - 1):
            raise RoutingError(
                f"request {sample.name}: routing has {len(array)} rows for {tokens} tokens; allowed: one for each, or all but "
                "the last. They were lost on the way from the rollout engine, or are another sample's."
            )
        recorded, _ = sample.proof
        if recorded < sample.needed:
            raise RoutingError(
                f"request {sample.name}: routing has {recorded} rows for {tokens} tokens, but its loss depends on the first "
                f"{sample.needed}; the rollout engine did not record them, or they were lost on the way."
            )
        if not recorded:
            return 0, None
        return recorded, self._routes_of(sample, without_digests(array)[:recorded], recorded)

    def _routes_of(self, sample: _Sample, array: Any, rows: int) -> Tensor:
        """Return routes of so many tokens in the model's MoE layers, and check their ids unless another rank or pass does."""
        layout, where = self.layout, f"request {sample.name}"
        shape = (rows, len(layout.layers), layout.top_k)
        if isinstance(array, Tensor) and array.shape == shape and not array.is_floating_point() and array.is_cpu:
            if sample.checks_ids:
                narrow = array.numpy().astype("u1" if layout.num_experts <= 256 else "u2")
                check_ids(array.numpy(), narrow, layout.num_experts, tuple(layout.layers), where)
            return array
        trace = RoutingTrace.ingest(  # of all decoder layers, or malformed
            array,
            num_experts=layout.num_experts,
            layers=layout.layers,
            tokens=rows,
            version=0,
            request=sample.name,
            top_k=layout.top_k,
            last_row=True,
        )
        return trace.experts if trace.experts.dtype == torch.uint8 else trace.experts.view(torch.int16)

    def metrics(self) -> dict[str, float]:
        """Return the agreement since the last call, over all ranks, which must all call this."""
        return self.take_agreement(TRAIN, WORLD) | self.take_others(TRAIN, WORLD, sharing=self._sharing)


def _is_over(trace: RoutingTrace, wanted: TokenRows) -> bool:
    """Tell whether a recorded pass is over these tokens; the padding behind them may be recorded as tokens."""
    found = trace.token_rows()
    if found is None or len(found.ids) != len(wanted.ids):
        return False
    return not bool(wanted.to(found.ids.device).differ(replace(found, masked=False)).any())


def lengths(data: Any) -> list[int]:
    """Return the tokens of each sample."""
    return [int(count) for count in data["input_ids"].offsets().diff().tolist()]


def _is_trace(array: Tensor | None) -> TypeGuard[Tensor]:
    return array is not None and array.dim() == 3 and not array.is_floating_point()


def _mark(ids: Tensor, array: Tensor) -> int:
    """Return a number for a sample by all of its token ids, and by some rows of its routes with their digests.

    A row's digest is of its token and of all before it, and the last row is among those looked at (the last but one, where the
    engine recorded none for the last token). So the routes of other tokens differ there, and moved rows differ everywhere.
    """
    rows = torch.cat([array[:: max(len(array) // MARKED, 1)], array[-2:]])
    return hash((ids.cpu().numpy().astype("u4").tobytes(), tuple(array.shape), rows.cpu().numpy().tobytes()))


def proofs_of(data: Any) -> list[Proof]:
    """Return what `proven` says of each sample's routes and tokens."""
    pairs = zip(routes(data), data["input_ids"].unbind(), strict=True)
    return [proven(array, ids) if _is_trace(array) else (0, False) for array, ids in pairs]


def other_than_recorded(proofs: Sequence[Proof], needed: Sequence[int]) -> dict[int, int]:
    """Return which samples R3's routes are not of, in the first rows, as many as `needed`, and from which token on."""
    found = {}
    for row, ((count, other), rows) in enumerate(zip(proofs, needed, strict=True)):
        if other and count < rows:
            found[row] = count
    return found


def altered(data: Any) -> dict[int, int]:
    """Return which samples with a loss have other token ids than R2 recorded their routes of, and from which token on.

    verl's Megatron engine returns no ids with the routes. They are then the agent loop's prompt and response; where these are
    missing or padded, there is nothing to compare with.
    """
    field, prompts, responses = (data.get(name, None) for name in (TOKENS, "prompts", "responses"))
    if field is not None:
        sampled = list(field.unbind())
    elif prompts is not None and responses is not None and prompts.is_nested and responses.is_nested:
        sampled = [torch.cat(pair) for pair in zip(prompts.unbind(), responses.unbind(), strict=True)]
    else:
        return {}
    found = {}
    for row, (then, now, rows) in enumerate(zip(sampled, data["input_ids"].unbind(), needed(data), strict=True)):
        count = min(len(then), len(now))
        wrong = (then[:count].cpu().long() != now[:count].cpu()).nonzero()
        if rows and (len(wrong) or len(then) != len(now)):
            found[row] = int(wrong[0]) if len(wrong) else count
    return found


def check_tokens(others: dict[int, int], data: Any, rank: int, forward_only: bool) -> None:
    """Raise RoutingError for an update of samples whose routes are of other tokens; in a scoring pass the model routes them."""
    if others and not forward_only:
        row, token = next(iter(others.items()))
        past = "" if token else "; or the routes did not come through the client of verl's get_llm_client"
        raise RoutingError(ALTERED.format(names(data, rank)[row], len(others), len(data), token, past))


def routes(data: Any) -> list[Tensor | None]:
    """Return the routes of each sample as they came `[rows, layers, K]`, None where a sample has none; raises RoutingError."""
    field = data.get(FIELD, None)
    if field is None:
        raise RoutingError(
            f"the batch of {len(data)} samples has no {FIELD!r}, so it cannot be replayed: with R3 the rollout engine returned "
            "no routing for one of them or more (rollout.enable_rollout_routing_replay=True is needed); with R2 no pass computed "
            "old log-probabilities before this one."
        )
    # A stack of objects where some are None.
    rows = field.unbind() if isinstance(field, Tensor) else field.tolist()
    return [None if row is None else torch.as_tensor(row) for row in rows]


def needed(data: Any) -> list[int]:
    """Return how many rows of each sample, from the first on, its loss depends on: none where it has no loss, or is bad.

    The token at position t is predicted from the row of position t - 1, and through attention from all before it.
    """
    prompts = data.get("prompts", None)
    known = prompts is not None and prompts.is_nested  # padded prompts do not say where a response begins
    starts = prompts.offsets().diff().tolist() if known else [None] * len(data)
    found = []
    for mask, start, tokens, bad in zip(data["loss_mask"].unbind(), starts, lengths(data), bad_rows(data), strict=True):
        trained = np.flatnonzero(mask.bool().cpu().numpy())
        if bad or not len(trained):
            found.append(0)
        else:
            found.append(tokens - 1 if start is None else int(start + trained[-1]))
    return found


def versions(data: Any) -> list[Span | None]:
    """Return the versions of the weights that sampled each sample, as verl's servers stamp them; None when unknown.

    Of several turns an agent loop may hand on the last one's stamps alone; the client has noted the versions of all of them.
    """
    fields = data.get("extra_fields", None)
    rows = fields.tolist() if hasattr(fields, "tolist") else fields
    if not isinstance(rows, (list, tuple)) or len(rows) != len(data):
        return [None] * len(data)
    found: list[Span | None] = []
    for row in rows:
        first, last = row.get("min_global_steps"), row.get("max_global_steps")
        noted = [version for version, _ in row.get(VERSIONS) or [] if version is not None]
        found.append(None if first is None or last is None else (min([int(first), *noted]), int(last)))
    return found


def names(data: Any, rank: int) -> list[str]:
    """Return what to call each sample in messages that begin with "request"."""
    numbered = [f"{index} of rank {rank}'s mini-batch" for index in range(len(data))]
    uids = data.get("uid", None)
    uids = uids.tolist() if hasattr(uids, "tolist") else uids
    if isinstance(uids, (list, tuple)) and len(uids) == len(numbered):
        return [f"{name} (uid {uid})" for name, uid in zip(numbered, uids, strict=True)]
    return numbered
