"""Replay recorded experts in a transformers model.

Replay changes which experts run, and nothing else: it answers the router's top-k. The model's own code computes the gate
weights from the router's present scores, so that gradients reach the router whatever the formula is.

Shapes: R rows (tokens of a forward pass, batch-first: row b * S + s is token s of sample b), L MoE layers, K experts per token,
E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations

import torch
from mismatch_ext.adapters.transformers.routing.binding import Binding
from mismatch_ext.adapters.transformers.routing.layout import MoeLayout
from mismatch_ext.adapters.transformers.routing.record import Recording
from mismatch_ext.adapters.transformers.routing.session import Forward
from torch import Tensor, nn

from mismatch_ext.errors import ReplayError, RoutingError
from mismatch_ext.routing import RoutingTrace
from mismatch_ext.routing.tokens import Others, Proof


class Replay:
    """Routes that the forward passes under `replay_routing` were given.

    Args:
        layout: The model's routers.
        trace: Routes, a row per token.
        mask: True for rows that are replayed `[R]`; None replays all.
        native: Whether to record the model's own choice beside the replayed one.
        others: How to treat a pass that is not proven to be over the trace's tokens, as for `replay_routing`.

    Attributes:
        forwards: Number of forward passes of the decoder that were replayed.
        rows: Number of tokens routed, over all those passes.
        native_rows: Number of these tokens that the mask left to the model's own routing.

    Raises:
        RoutingError: Trace or mask do not fit the model or each other, or the trace has ids that no router can choose.
    """

    replays = True

    def __init__(
        self, layout: MoeLayout, trace: RoutingTrace, mask: Tensor | None, native: bool, others: Others = "refuse"
    ) -> None:
        layout.expect(trace)
        self._proof = Proof(trace.token_rows(), trace.rows, others)
        if mask is not None and (mask.dtype != torch.bool or mask.shape != (trace.rows,)):
            raise RoutingError(
                f"mask is {mask.dtype} {tuple(mask.shape)}; allowed: torch.bool, one per row of the trace, ({trace.rows},)."
            )
        _refuse_ids(trace, mask)
        self.layout = layout
        self.forwards = self.rows = self.native_rows = 0
        self._trace = trace
        self._left = 0 if mask is None else trace.rows - int(mask.sum())
        # A mask that replays every row is the same as no mask, and then the model's own top-k need not run at all.
        self._mask = mask if self._left else None
        self._native = Recording(layout) if native else None
        self._placed: dict[torch.device, tuple[RoutingTrace, Tensor | None]] = {}

    @property
    def native(self) -> RoutingTrace:
        """What the model itself would have chosen in each layer, after the replayed routes in the layers before it.

        Raises:
            ReplayError: Recording it was not asked for, or no forward pass was run.
        """
        if self._native is None:
            raise ReplayError("the model's own routing was not recorded; use replay_routing(..., native=True).")
        return self._native.trace

    @property
    def others(self) -> int:
        """Number of forward passes over other tokens, which the model routed itself."""
        return self._proof.others

    def expect_replayed(self) -> None:
        """Refuse a context in which only passes over other tokens ran."""
        self._proof.expect_replayed(self.forwards, self.layout.family)

    def takes(self, forward: Forward) -> bool:
        """Compare a pass's tokens with the trace's, once and on their device.

        Raises:
            ReplayError: The tokens differ or are not known, and no other passes are allowed.
        """
        return self._proof.holds(forward.tokens, self.layout.family, again=forward.recomputed)

    def select(
        self, layer: int, forward: Forward | None, scores: Tensor, plain: Callable[[], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Give the router the trace's experts, with the scores that it now has for them.

        Args:
            layer: Absolute decoder index.
            forward: The running pass; None when a layer is recomputed.
            scores: The scores by which the router ranks experts `[..., E]`, R rows in all.
            plain: Computes the top-k of the scores.

        Returns:
            The scores of the trace's experts, and their ids, int64, both `[..., K]`.

        Raises:
            ReplayError: The trace has another number of rows.
        """
        tokens = scores.numel() // scores.shape[-1]
        if tokens != self._trace.rows:
            raise ReplayError(
                f"{self.layout.family}, layer {layer}: the routing trace has {self._trace.rows} rows, the forward pass {tokens} "
                "tokens, padding included; pass the rows of exactly these tokens, as mismatch_ext.routing.align makes them."
            )
        trace, mask = self._on(scores.device)
        # Ids are widened to int64 for one layer at a time, also when it is recomputed, so the graph never holds all layers' so.
        indices = trace.layer(layer).view(*scores.shape[:-1], -1)
        native = self._native if forward is not None and not forward.recomputed else None
        if mask is not None or native is not None:
            with torch.no_grad():
                chosen = plain()[1]
            if native is not None and forward is not None:
                native.keep(layer, forward, chosen)
            if mask is not None:
                indices = torch.where(mask.view(*scores.shape[:-1], 1), indices, chosen)
        return scores.gather(-1, indices), indices

    def finish(self, forward: Forward) -> None:
        """Count a pass."""
        self.forwards += 1
        self.rows += self._trace.rows
        self.native_rows += self._left
        if self._native is not None:
            self._native.finish(forward)

    def _on(self, device: torch.device) -> tuple[RoutingTrace, Tensor | None]:
        """Return trace and mask on a device. They are moved once, in the narrow dtype, because each copy waits for the device."""
        if device not in self._placed:
            moved = replace(self._trace, parts=(self._trace.experts.to(device),))
            self._placed[device] = moved, None if self._mask is None else self._mask.to(device)
        return self._placed[device]


@contextmanager
def replay_routing(
    model: nn.Module,
    trace: RoutingTrace,
    mask: Tensor | None = None,
    *,
    native: bool = False,
    others: Others = "refuse",
) -> Iterator[Replay]:
    """Route the tokens of the forward passes in this context as a trace says.

    A pass is replayed if it is over the trace's tokens: ids, padding and beginnings of sequences must be equal in every row.

    Use one context for each micro-batch. Its backward pass may come at any time and in any order, inside or after the context,
    and recomputes checkpointed activations, in both modes, with the same routes.

    Args:
        model: A transformers model, possibly wrapped (PEFT, DDP, FSDP).
        trace: A row per token of the micro-batch, batch-first, padding included, as `align` or `align_packed` makes it.
        mask: True for rows that are replayed `[R]`, bool; the others are routed by the model. None replays all.
        native: Whether to record what the model itself would choose, too; this costs a top-k per layer.
        others: How to treat another pass: "refuse" raises, "native" lets the model route it as if there were no context and
            counts it, and "replay" compares nothing, for inputs that are not token ids; the caller then vouches for them.

    Yields:
        The replay: its counts and, if asked for, the `native` routes.

    Raises:
        RoutingError: The trace does not fit the model, has ids that no router can choose, or does not know its tokens.
        ReplayError: The model's routing cannot be replayed; a forward pass has other tokens than the trace, did not run each
            layer's router once, or did not obey it; or no forward pass over the trace's tokens went through the model.
    """
    binding = Binding.of(model)
    replay = Replay(binding.layout, trace, mask, native, others)
    with binding.active(replay):
        yield replay
    replay.expect_replayed()
    if not replay.forwards:
        raise ReplayError(
            f"{replay.layout.family}: no forward pass went through the model that the routing trace was bound to, so nothing "
            "was replayed. Was the model built anew, a copy of it called, or is it run by a compiled graph?"
        )


def _refuse_ids(trace: RoutingTrace, mask: Tensor | None) -> None:
    """Refuse ids that no router chooses; with them a model would run on, or fail far from here. Ingested traces have none."""
    first = 0
    for part in trace.parts:
        wrong = _wrong(part, trace.num_experts)
        rows = wrong.any(1)
        if mask is not None:
            rows = rows & mask[first : first + len(part)].to(rows.device)
        if bool(rows.any()):
            row = int(rows.nonzero()[0])
            layer = int(wrong[row].nonzero()[0])
            raise RoutingError(
                f"row {first + row}, layer {trace.layers[layer]} of the routing trace is {part[row, layer].tolist()}; allowed: "
                f"distinct ids from 0 to {trace.num_experts - 1}."
            )
        first += len(part)


def _wrong(part: Tensor, num_experts: int) -> Tensor:
    """Return a mask `[rows, L]`, True for each route that has an id out of range, or the same id twice."""
    # torch has little arithmetic for uint16, the storage dtype for more than 256 experts.
    ids = part.view(torch.int16).to(torch.int32) & 0xFFFF if part.dtype == torch.uint16 else part
    # Slots are compared in pairs: this runs for every micro-batch, and is several times faster than sorting each route's K ids.
    slots = ids.movedim(-1, 0).contiguous().unbind()
    wrong = torch.stack([slot > num_experts - 1 for slot in slots]).any(0)
    for slot, other in combinations(slots, 2):
        wrong |= slot == other
    return wrong
