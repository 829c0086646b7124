"""Record and replay the experts that megatron-core's routers choose.

A trace has the tokens of the micro-batch batch-first: row b * S + s is token s of sample b, as `input_ids.flatten()` has them,
whatever order and share of them a rank's routers see. A packed micro-batch (one row of length T) is in its own order.

Replay changes which experts run; gate weights are computed from the router's present scores by the router's own formula, so
gradients reach the router. Two things go with it: `moe_router_enable_expert_bias` counts the replayed routes as load; and
an auxiliary loss, if on, is computed by megatron from the trainer's own top-k, not from the replayed one.

Shapes: B batch, S sequence, C the part of the sequence on this rank, R = B * S rows, L MoE layers, K experts per token,
E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from mismatch_ext.errors import ReplayError, RoutingError
from mismatch_ext.routing import RoutingTrace, storage_dtype
from mismatch_ext.routing.tokens import Others, Proof, TokenRows
from tests.peers.megatron.parked.binding import Binding, Forward
from tests.peers.megatron.parked.layout import Chunk, MoeLayout, moe_layout
from tests.peers.megatron.parked.order import to_batch_first, to_local

TopK = tuple[Tensor, Tensor]


class Recording:
    """Routes of the forward passes under `record_routing`.

    Args:
        layout: The model's routers.
    """

    replays = False

    def __init__(self, layout: MoeLayout) -> None:
        self.layout = layout
        # A chunk of dense layers alone has nothing to record.
        self._parts: dict[int, list[Tensor]] = {index: [] for index, chunk in enumerate(layout.chunks) if chunk.moe}
        self._tokens: dict[int, list[TokenRows | str | None]] = {index: [] for index in self._parts}

    @property
    def trace(self) -> RoutingTrace:
        """Routes of all passes so far, in order: rows of a pass batch-first, layers of all chunks together.

        Raises:
            ReplayError: Nothing was recorded, or the chunks saw different numbers of tokens.
        """
        rows = {index: sum(map(len, parts)) for index, parts in self._parts.items()}
        if len(set(rows.values())) > 1 or not any(self._parts.values()):
            raise ReplayError(
                f"tokens recorded per model chunk: {rows}; run at least one forward, and each micro-batch through all chunks."
            )
        numbers = [layer for chunk in self.layout.chunks for layer in chunk.moe]
        order = sorted(range(len(numbers)), key=numbers.__getitem__)
        per_chunk = list(self._parts.values())
        parts = per_chunk[0]
        if len(per_chunk) > 1:
            parts = [torch.cat([torch.cat(each) for each in per_chunk], dim=1)[:, order].contiguous()]
        # The chunks of a stage see the same passes, and the first of the model is told what they are over.
        known = [[rows for rows in each if isinstance(rows, TokenRows)] for each in self._tokens.values()]
        whole = next((each for each in known if len(each) == len(per_chunk[0])), None)
        return RoutingTrace(
            parts=tuple(parts),
            layers=self.layout.layers,
            num_experts=self.layout.num_experts,
            tokens=None if whole is None else torch.cat([rows.ids.to(torch.int32) for rows in whole]),
            starts=None if whole is None else torch.cat([rows.starts for rows in whole]),
        )

    def takes(self, forward: Forward) -> bool:
        """Take every pass."""
        return True

    def select(
        self,
        chunk: Chunk,
        layer: int,
        forward: Forward | None,
        shape: torch.Size,
        scores: Tensor,
        plain: Callable[[], TopK],
    ) -> TopK:
        """Let the router choose, and remember its choice."""
        values, indices = plain()
        if forward is not None:
            forward.seen[layer] = indices.to(storage_dtype(self.layout.num_experts))
        return values, indices

    def finish(self, forward: Forward) -> None:
        """Gather a pass's routes over the ranks that divide its sequence; all of them must be recording."""
        chunk = forward.chunk
        if not chunk.moe:
            return
        local = torch.stack([forward.seen[layer] for layer in chunk.moe], dim=1)
        rows = to_batch_first(local, forward.batch, chunk.group, chunk.ranks)
        index = self.layout.chunks.index(chunk)
        self._parts[index].append(rows)
        self._tokens[index].append(forward.tokens)


class Replay:
    """Routes that the forward passes under `replay_routing` were given.

    Args:
        layout: The model's routers.
        trace: Routes, a row per token.
        mask: True where a row is replayed `[R]`; None for all.
        native: Whether to record the model's own choice beside the replayed one.
        others: What becomes of a pass that is not proven to be over the trace's tokens, as for `replay_routing`.

    Attributes:
        forwards: Forward passes of decoder blocks that were replayed.
        rows: Tokens routed, over all passes, on all ranks of a divided sequence.
        native_rows: Those of them that the mask left to the model's own routing.
    """

    replays = True

    def __init__(
        self, layout: MoeLayout, trace: RoutingTrace, mask: Tensor | None, native: bool, others: Others = "refuse"
    ) -> None:
        layout.expect(trace)
        # A stage that embeds nothing may not be told the tokens; the one that does proves them for all.
        blind = trace.tokens is None and not any(getattr(chunk.model, "pre_process", True) for chunk in layout.chunks)
        self._proof = Proof(trace.token_rows(), trace.rows, "replay" if blind else others)
        if mask is not None and (mask.dtype != torch.bool or mask.shape != (trace.rows,)):
            raise RoutingError(
                f"mask is {mask.dtype} {tuple(mask.shape)}; allowed: torch.bool, one per row of the trace, ({trace.rows},)."
            )
        _refuse_ids(trace, mask, layout.layers)
        self.layout = layout
        self.forwards = self.rows = self.native_rows = 0
        self._trace = trace
        self._mask = None if mask is None or bool(mask.all()) else mask
        self._left = 0 if self._mask is None else int((~self._mask).sum())
        self._native = Recording(layout) if native else None

    @property
    def native(self) -> RoutingTrace:
        """What the model itself would have chosen, with the replayed routes in the layers before.

        Raises:
            ReplayError: It was not asked for, or no forward pass was run.
        """
        if self._native is None:
            raise ReplayError("the model's own routing was not recorded; use replay_routing(..., native=True).")
        return self._native.trace

    @property
    def others(self) -> int:
        """Forward passes over other tokens, which the model routed itself."""
        return self._proof.others

    def takes(self, forward: Forward) -> bool:
        """Compare a pass's tokens with the trace's, once and on their device.

        Raises:
            ReplayError: They are others, or are not known, and no other passes are allowed.
        """
        tokens = forward.tokens
        return tokens is None or self._proof.holds(tokens, "megatron-core model", again=forward.again)

    def expect_replayed(self) -> None:
        """Refuse a context in which only other passes ran."""
        self._proof.expect_replayed(self.forwards, "megatron-core model")

    def select(
        self,
        chunk: Chunk,
        layer: int,
        forward: Forward | None,
        shape: torch.Size,
        scores: Tensor,
        plain: Callable[[], TopK],
    ) -> TopK:
        """Give the router the trace's experts, with the scores that it has for them now."""
        part, batch = shape[0], shape[1]
        rows = part * chunk.ranks * batch
        if self._trace.rows != rows:
            raise ReplayError(
                f"decoder layer {layer}: the routing trace has {self._trace.rows} rows, the forward pass {rows} tokens "
                f"({batch} x {part * chunk.ranks}, padding included); pass the rows of exactly these tokens, as "
                "mismatch_ext.routing.align makes them."
            )
        indices = to_local(self._trace.layer(layer, scores.device), batch, chunk.rank, chunk.ranks)
        if self._native is not None and forward is not None:
            with torch.no_grad():
                own = plain()[1]
            forward.seen[layer] = own.to(storage_dtype(self.layout.num_experts))
        if self._mask is not None:
            mask = to_local(self._mask.to(scores.device), batch, chunk.rank, chunk.ranks)
            with torch.no_grad():
                indices = torch.where(mask[:, None], indices, plain()[1])
        return scores.gather(1, indices), indices

    def finish(self, forward: Forward) -> None:
        """Count a pass."""
        self.forwards += 1
        self.rows += self._trace.rows
        self.native_rows += self._left
        if self._native is not None:
            self._native.finish(forward)


@contextmanager
def record_routing(model: nn.Module | Sequence[nn.Module]) -> Iterator[Recording]:
    """Record the experts of every forward pass of a megatron-core GPT model; nothing that it computes changes.

    With pipeline parallelism each rank records its own layers. With sequence parallelism the ranks of a tensor-parallel group
    gather their rows after each pass, so that all of them must record.

    Args:
        model: The model, or its chunks under virtual pipeline parallelism.

    Yields:
        The recording; `recording.trace` afterwards.

    Raises:
        ReplayError: The model's routing cannot be recorded; names the setting or layer.
    """
    layout = moe_layout(model)
    recording = Recording(layout)
    with Binding(layout.chunks, recording).installed():
        yield recording


@contextmanager
def replay_routing(
    model: nn.Module | Sequence[nn.Module],
    trace: RoutingTrace,
    mask: Tensor | None = None,
    *,
    native: bool = False,
    others: Others = "refuse",
) -> Iterator[Replay]:
    """Route the tokens of the forward passes in this context as a trace says.

    A pass is replayed that proves to be over the trace's tokens: equal ids and beginnings of sequences, in every row, and causal
    attention. It is proven where the ids are given to the model: a pipeline stage that is given none follows the first one.

    One micro-batch a context: its backward pass may come at any time and in any order, inside or after the context, and
    recomputes activations (`recompute_granularity`, or torch.utils.checkpoint) with the same routes.

    Args:
        model: The model, or its chunks under virtual pipeline parallelism.
        trace: A row per token of the micro-batch, batch-first, all of it on every rank; its layers are those of the whole
            model or of these chunks.
        mask: True for rows that are replayed `[R]`, bool; the others are routed by the model. None replays all.
        native: Also record what the model itself would choose; costs a top-k per layer.
        others: What becomes of another pass: "refuse" raises, "native" lets the model route it as if there were no context and
            counts it, and "replay" compares nothing, for inputs that are no token ids, whose caller vouches for them.

    Yields:
        Counts, and `native`.

    Raises:
        RoutingError: The trace does not fit the model, has ids that no router can choose, or does not know its tokens.
        ReplayError: The model's routing cannot be replayed; a forward pass has other tokens than the trace, or did not run
            each router once; or no forward pass over the trace's tokens went through the model.
    """
    layout = moe_layout(model)
    if others == "native" and layout.model_layers != layout.layers:
        raise ReplayError(
            "others='native' with pipeline parallelism: a stage that is given no token ids cannot tell another pass from the one "
            "that is replayed. Run other passes outside of this context, with others='refuse'."
        )
    replay = Replay(layout, trace, mask, native, others)
    with Binding(layout.chunks, replay).installed():
        yield replay
    replay.expect_replayed()
    if not replay.forwards:
        raise ReplayError(
            "no forward pass went through the model that the routing trace was bound to, so nothing was replayed. Was the "
            "model built anew, or a copy of it called?"
        )


def _refuse_ids(trace: RoutingTrace, mask: Tensor | None, layers: tuple[int, ...]) -> None:
    """Refuse ids that no router chooses. Ingested traces have none, but megatron would run with them, at less gate mass."""
    for layer in layers:
        ids = trace.layer(layer)
        wrong = (ids < 0) | (ids >= trace.num_experts)
        ordered = ids.sort(dim=1).values
        wrong[:, 1:] |= ordered[:, 1:] == ordered[:, :-1]
        rows = wrong.any(dim=1)
        if mask is not None:
            rows &= mask.to(rows.device)
        if bool(rows.any()):
            row = int(rows.nonzero()[0])
            raise RoutingError(
                f"row {row}, layer {layer} of the routing trace is {ids[row].tolist()}; allowed: distinct ids from 0 to "
                f"{trace.num_experts - 1}."
            )
