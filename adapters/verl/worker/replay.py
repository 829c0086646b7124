"""Replay over the micro-batches of verl's FSDP engine: the routes of each sample, checked, and laid out as its tokens are.

R3: the routes of the rollout engine come with the samples, in verl's own field `routed_experts`. R2: the pass that computes
old log-probabilities records them, and returns them as an output of that name, so that verl's batch holds them for the update.
Either way they travel with their sample, through every shuffle and split, and are checked before any forward pass runs.

Shapes: T tokens of a sample, L MoE layers, K experts per token, R rows of a forward pass, padding included.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from mismatch_ext.adapters.transformers import routing as backend
from mismatch_ext.adapters.verl.worker.ulysses import Share
from torch import Tensor, nn

from mismatch_ext.config import RoutingConfig
from mismatch_ext.errors import RoutingError
from mismatch_ext.ranks import WORLD, agree
from mismatch_ext.routing import RoutingTrace, align, align_packed
from mismatch_ext.routing.replay import RouteReplay
from mismatch_ext.routing.tokens import PADDING, TokenRows
from mismatch_ext.routing.trace import Span, stamped

FIELD = "routed_experts"
TRAIN = "train"
"""Split of all passes of the policy: verl's engines do not validate."""
TOKENS = "routed_tokens"
"""Field of the token ids whose routes R2 recorded; R3's routes are those of `prompts` and `responses`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SampleRoutes:
    """Routes of one sample.

    Args:
        trace: A row for each of its tokens.
        recorded: How many of them, from the first on, were recorded; the model routes the others itself.
        counted: Whether its tokens are compared and counted; those of a sample without a loss, such as fills up a batch, are not.
    """

    trace: RoutingTrace
    recorded: int
    counted: bool = True


@dataclass(frozen=True, kw_only=True)
class Rows:
    """How a forward pass lays out the tokens of its samples.

    Args:
        lengths: Tokens of each sample.
        packed: Whether samples follow each other in one row; otherwise each is padded on the right to the longest.
        padding: Tokens after the last sample of a packed row.
    """

    lengths: tuple[int, ...]
    packed: bool
    padding: int = 0

    @property
    def places(self) -> list[int]:
        """Row of each sample's first token."""
        if not self.packed:
            return [index * max(self.lengths) for index in range(len(self.lengths))]
        return [sum(self.lengths[:index]) for index in range(len(self.lengths))]

    def real(self) -> Tensor:
        """Return which rows are tokens, not padding `[R]`."""
        if self.packed:
            return torch.arange(sum(self.lengths) + self.padding) < sum(self.lengths)
        return self.attention().flatten()

    def token_rows(self, ids: Sequence[Tensor]) -> TokenRows:
        """Return the rows of a forward pass over the samples' token ids, a row per token."""
        rows = len(self.real())
        found, starts = torch.full((rows,), PADDING, dtype=torch.int32), torch.zeros(rows, dtype=torch.bool)
        for place, own in zip(self.places, ids, strict=True):
            found[place : place + len(own)] = own
            starts[place] = True
        return TokenRows(ids=found, starts=starts)

    def attention(self) -> Tensor:
        """Return which places of a padded batch are tokens `[B, S]`."""
        return torch.arange(max(self.lengths)) < torch.tensor(self.lengths)[:, None]


class EngineReplay(RouteReplay):
    """Records or replays routing around an engine's forward passes.

    Ranks refuse routes together: one that failed alone would leave the others waiting for it in a collective.

    Args:
        config: The `routing` section.
        model: The engine's model, wrapped as the engine runs it.
        seed: The engine's.
        sharing: Ranks that share a pass, each with a piece of its rows.

    Raises:
        ReplayError: The model's routing cannot be replayed.
    """

    def __init__(self, config: RoutingConfig, model: nn.Module, seed: int, sharing: int = 1) -> None:
        super().__init__(config, backend, model, seed=seed, ranks=WORLD)
        self._model, self._sharing = model, sharing
        self.weight_version: int | None = None  # version that the rollout engine was sent last
        self.takes_older = False  # whether rollouts may be of older weights than these

    def ingest(
        self,
        arrays: Sequence[Any],
        tokens: Sequence[Tensor],
        needed: Sequence[int],
        names: Sequence[str],
        versions: Sequence[Span | None] | None = None,
    ) -> list[SampleRoutes]:
        """Check the routes of a batch's samples.

        Args:
            arrays: Expert ids of each sample `[rows, layers, K]`; None for a sample without routes.
            tokens: Token ids of each sample `[T]`.
            needed: Rows of each sample, from the first on, that its loss depends on.
            names: What to call each sample in messages.
            versions: Versions of the weights that each sample's first and last token were sampled with; None when unknown.

        Raises:
            RoutingError: Routes are missing, malformed or of other weights; names sample, row and layer.
        """
        read = self._recorded if self.config.mode == "R3" else self._complete
        counts = [len(ids) for ids in tokens]
        found = [read(*sample) for sample in zip(arrays, counts, needed, names, strict=True)]
        sent = self.weight_version
        spans = [None] * len(found) if versions is None else versions
        if self.config.mode == "R2" and sent is not None:
            spans = [(sent, sent)] * len(found)  # recorded by this engine, whichever weights sampled the tokens
        return [
            replace(
                routes,
                trace=stamped(routes.trace, span, sent, name, older=self.takes_older).of_tokens(ids),
                counted=rows > 0,
            )
            for routes, ids, rows, span, name in zip(found, tokens, needed, spans, names, strict=True)
        ]

    def _complete(self, array: Any, tokens: int, needed: int, name: str) -> SampleRoutes:
        """Read what a pass of this engine has recorded: a row for every token."""
        return SampleRoutes(trace=self._ingested(array, tokens, name), recorded=tokens)

    def _recorded(self, array: Any, tokens: int, needed: int, name: str) -> SampleRoutes:
        """Read a rollout engine's routes as verl hands them on: rows that were not recorded are zero, and come last.

        The last sampled token never passes through the rollout engine, nor do tokens that an agent loop adds after the last
        generation. Samples with which verl fills up a batch have no routes at all. None of these rows has a loss.
        """
        ids = None if array is None else torch.as_tensor(array)
        if ids is None or ids.dim() != 3 or ids.is_floating_point():
            self._ingested(array, tokens, name)  # says what is wrong with it
        assert ids is not None
        if len(ids) not in (tokens, tokens - 1):
            raise RoutingError(
                f"request {name}: routing has {len(ids)} rows for {tokens} tokens; allowed: one for each, or all but the last. "
                "They were lost on the way from the rollout engine, or are another sample's."
            )
        recorded = len(ids)
        if not needed and not bool(ids.any()):
            recorded = 0
        elif self.layout.top_k > 1:
            # Only the end is scanned: a whole scan would take longer than all other checks, and earlier zeros are refused anyway.
            while recorded and not bool(ids[recorded - 1].any()):
                recorded -= 1
        elif recorded == tokens:
            # With one expert per token a row of zeros is a valid route. Only its place, the last one, says that it is not one.
            recorded -= 1
        if recorded < needed:
            raise RoutingError(
                f"request {name}: routing has {recorded} rows for {tokens} tokens, and zeros from there on, but its loss depends "
                f"on the first {needed}; the rollout engine did not record them, or they were lost on the way."
            )
        filler = self._filler(tokens - recorded)
        if not recorded:
            layers, experts = self.layout.layers, self.layout.num_experts
            return SampleRoutes(trace=RoutingTrace(parts=(filler,), layers=layers, num_experts=experts), recorded=0)
        trace = self._ingested(ids[:recorded], recorded, name)
        return SampleRoutes(trace=replace(trace, parts=(*trace.parts, filler)), recorded=recorded)

    def _ingested(self, array: Any, tokens: int, name: str) -> RoutingTrace:
        layout = self.layout
        return RoutingTrace.ingest(
            array,
            num_experts=layout.num_experts,
            layers=layout.layers,
            tokens=tokens,
            version=0,  # `ingest` stamps it
            request=name,
            top_k=layout.top_k,
            last_row=True,
        )

    def _filler(self, rows: int) -> Tensor:
        """Return valid routes for rows where a mask prevents their use."""
        dtype = torch.uint8 if self.layout.num_experts <= 256 else torch.uint16
        filler = torch.arange(self.layout.top_k, dtype=torch.int32).to(dtype)
        return filler.expand(rows, len(self.layout.layers), -1).contiguous()

    @contextmanager
    def over_samples(self, samples: Sequence[SampleRoutes], rows: Rows, *, split: str, share: Share) -> Iterator[None]:
        """Run the forward pass of a micro-batch under the routes of its samples.

        Args:
            samples: Routes of its samples, in its order.
            rows: Where their tokens lie.
            split: What the pass counts for, as for `replaying`.
            share: Which of these rows this rank's model sees.

        Raises:
            RoutingError: Routes do not fit their tokens, or cannot be this model's.
            ReplayError: The forward pass did not obey them.
        """
        trace, mask = self._laid(samples, rows)
        real = share.rows(_counted(samples, rows))
        with self.replaying(self._model, share.trace(trace), share.rows(mask), real=real, split=split):
            yield

    def _checkable(self, trace: RoutingTrace, mask: Tensor) -> Tensor:
        """Keep the rows of the weights that score them: routes that older weights chose also differ by what was learnt since."""
        if not self.takes_older or self.weight_version is None:
            return mask
        return mask & (trace.version_by_row() == self.weight_version).to(mask.device)

    def _laid(self, samples: Sequence[SampleRoutes], rows: Rows) -> tuple[RoutingTrace, Tensor]:
        """Return the routes of a forward pass, a row per token, and where they were recorded."""
        traces = [sample.trace for sample in samples]
        if rows.packed:
            trace, mask = align_packed(traces, rows.lengths)
            if rows.padding:
                trace = _padded(trace, self._filler(rows.padding))
                mask = torch.cat([mask, torch.zeros(rows.padding, dtype=torch.bool)])
        else:
            trace, mask = align(traces, rows.attention())
        for sample, place, length in zip(samples, rows.places, rows.lengths, strict=True):
            mask[place + sample.recorded : place + length] = False
        return trace, mask

    @contextmanager
    def recording(self, rows: Rows, ids: Sequence[Tensor], share: Share) -> Iterator[list[Tensor]]:
        """Record the forward pass of a micro-batch; afterwards the list holds the routes of each sample `[T, L, K]`.

        Args:
            rows: Where the tokens of its samples lie.
            ids: Token ids of its samples.
            share: Which of these rows this rank's model sees.

        Raises:
            RoutingError: No forward pass was over these tokens.
        """
        found: list[Tensor] = []
        with backend.record_routing(self._model) as recording:
            yield found
        wanted, passes = share.tokens(rows.token_rows(ids)), recording.passes
        own = [trace for trace in passes if _is_over(trace, wanted)]
        error = None
        if not own:
            error = RoutingError(
                f"R2 saw {len(passes)} forward passes of a micro-batch of {len(ids)} samples, none of them over their tokens: "
                "something changes them on their way to the model, and their routes are not known."
            )
        if share.ranks > 1:
            agree(error)
        elif error is not None:
            raise error
        self.others[TRAIN] += len(passes) - 1
        experts = own[-1].experts
        # Neither torch's pickles nor its nested tensors take unsigned 16 bits.
        if experts.dtype == torch.uint8:
            experts = share.whole(experts)
        else:
            experts = share.whole(experts.to(torch.int32)).to(torch.int16)
        found += [experts[place : place + length] for place, length in zip(rows.places, rows.lengths, strict=True)]

    def metrics(self) -> dict[str, float]:
        """Return the agreement since the last call, over all ranks, which must all call this."""
        return self.take_agreement(TRAIN, WORLD) | self.take_others(TRAIN, WORLD, sharing=self._sharing)


def _counted(samples: Sequence[SampleRoutes], rows: Rows) -> Tensor:
    """Return which rows of a forward pass are tokens of samples that count `[R]`."""
    real = rows.real().clone()
    for sample, place, length in zip(samples, rows.places, rows.lengths, strict=True):
        real[place : place + length] &= sample.counted
    return real


def _padded(trace: RoutingTrace, filler: Tensor) -> RoutingTrace:
    """Add rows behind the last sequence of a packed row."""
    assert trace.tokens is not None and trace.starts is not None
    return replace(
        trace,
        parts=(*trace.parts, filler),
        tokens=torch.cat([trace.tokens, torch.full((len(filler),), PADDING, dtype=torch.int32)]),
        starts=torch.cat([trace.starts, torch.zeros(len(filler), dtype=torch.bool)]),
    )


def _is_over(trace: RoutingTrace, wanted: TokenRows) -> bool:
    """Tell whether a recorded pass is over these tokens; the padding behind them may be recorded as tokens."""
    found = trace.token_rows()
    if found is None or len(found.ids) != len(wanted.ids):
        return False
    return not bool(wanted.to(found.ids.device).differ(replace(found, masked=False)).any())
