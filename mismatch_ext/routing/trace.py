"""The experts that each token of a sequence was routed to: the record that goes from the rollout engine to the trainer.

Shapes: R rows (tokens with a recorded route), L MoE layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mismatch_ext.errors import RoutingError
from mismatch_ext.routing.ingest import checked, storage_dtype
from mismatch_ext.routing.tokens import TokenRows


@dataclass(frozen=True, kw_only=True, eq=False)
class RoutingTrace:
    """Expert ids of consecutive tokens, in the engine's slot order.

    Args:
        parts: Blocks of rows `[rows, L, K]` in `storage_dtype(num_experts)`; the trace is their concatenation. A block may
            belong to several traces: the completions of a GRPO group share their prompt's rows.
        layers: Absolute decoder indices of the L MoE layers, ascending.
        num_experts: Experts per layer.
        start: Position of row 0 in the sequence; the prompt's length if its rows were left out.
        versions: Policy versions, run-length encoded: (first row, version), first rows ascending from 0. There are several
            entries if several versions of the policy contributed.
        tokens: Ids of the sequence's tokens, from its first token to that of the last row `[start + rows]`, int32. The routes
            belong only to a forward pass over these tokens. `PADDING` and `ANY` of `mismatch_ext.routing.tokens` may be among
            them. None if they are not known; the routes can then not be replayed.
        starts: True where a sequence begins, if there are several sequences `[start + rows]`, bool; None for one sequence.

    Raises:
        RoutingError: The parts disagree with each other or with the other fields.
    """

    parts: tuple[Tensor, ...]
    layers: tuple[int, ...]
    num_experts: int
    start: int = 0
    versions: tuple[tuple[int, int], ...] = ((0, 0),)
    tokens: Tensor | None = None
    starts: Tensor | None = None

    def __post_init__(self) -> None:
        if not self.parts:
            raise RoutingError("a routing trace has no rows: `parts` is empty; give at least one block [rows, L, K].")
        if not 1 <= self.num_experts <= 65536 or self.top_k > self.num_experts:
            raise RoutingError(
                f"a routing trace has num_experts={self.num_experts} and {self.top_k} experts per token; allowed: 1 to 65536 "
                "experts, and no more of them per token."
            )
        dtype = storage_dtype(self.num_experts)
        for index, part in enumerate(self.parts):
            if part.dim() != 3 or part.shape[1:] != (len(self.layers), self.top_k) or part.dtype != dtype:
                raise RoutingError(
                    f"part {index} of a routing trace is {part.dtype} {tuple(part.shape)}; allowed: {dtype} "
                    f"[rows, {len(self.layers)}, {self.top_k}] for {self.num_experts} experts."
                )
        if list(self.layers) != sorted(set(self.layers)) or (self.layers and self.layers[0] < 0):
            raise RoutingError(f"layers {self.layers} of a routing trace are not ascending absolute indices.")
        firsts = [first for first, _ in self.versions]
        if not firsts or firsts[0] != 0 or firsts != sorted(set(firsts)) or firsts[-1] >= max(self.rows, 1):
            raise RoutingError(
                f"versions {self.versions} of a routing trace of {self.rows} rows must be ((0, v), (row, v), ...) with rows "
                "ascending and inside it."
            )
        if self.start < 0:
            raise RoutingError(f"start={self.start} of a routing trace must be a position >= 0.")
        for name, given, dtype in (("tokens", self.tokens, torch.int32), ("starts", self.starts, torch.bool)):
            if given is not None and (given.shape != (self.start + self.rows,) or given.dtype != dtype):
                raise RoutingError(
                    f"{name} of a routing trace is {given.dtype} {tuple(given.shape)}; allowed: {dtype} "
                    f"({self.start + self.rows},), one per token up to that of the last row."
                )

    def __getstate__(self) -> dict[str, Any]:
        # torch 2.13 pickles uint16 tensors but cannot read them back, so they travel as int16 bits.
        parts = tuple(part.view(torch.int16) if part.dtype == torch.uint16 else part for part in self.parts)
        return {**self.__dict__, "parts": parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        parts = tuple(part.view(torch.uint16) if part.dtype == torch.int16 else part for part in state["parts"])
        self.__dict__.update(state, parts=parts)

    @property
    def top_k(self) -> int:
        """Experts per token."""
        return self.parts[0].shape[-1] if self.parts[0].dim() == 3 else 0

    @cached_property
    def rows(self) -> int:
        """Number of rows."""
        return sum(len(part) for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes of all parts; a part that other traces share is counted in each."""
        return sum(part.nbytes for part in self.parts)

    @property
    def experts(self) -> Tensor:
        """All expert ids `[rows, L, K]`, in the storage dtype."""
        return self.parts[0] if len(self.parts) == 1 else torch.cat(self.parts)

    def layer(self, layer: int, device: torch.device | str | None = None) -> Tensor:
        """Return one layer's expert ids `[rows, K]`, int64; ids are widened only here, so a device holds one wide layer at once.

        Args:
            layer: Absolute decoder index.
            device: Device of the result; the narrow ids are moved before they are widened.

        Raises:
            RoutingError: The trace has no such layer.
        """
        try:
            index = self.layers.index(layer)
        except ValueError:
            raise RoutingError(f"layer {layer} is not in the routing trace; it has layers {self.layers}.") from None
        narrow = [part[:, index] for part in self.parts]
        ids = narrow[0] if len(narrow) == 1 else torch.cat(narrow)
        return ids.to(device=device).to(torch.int64)

    def to(self, device: torch.device | str) -> RoutingTrace:
        """Return the trace on a device; parts that are already there are not copied."""
        return replace(
            self,
            parts=tuple(part.to(device) for part in self.parts),
            tokens=None if self.tokens is None else self.tokens.to(device),
            starts=None if self.starts is None else self.starts.to(device),
        )

    def of_tokens(self, ids: Sequence[int] | Tensor) -> RoutingTrace:
        """Return the trace with the tokens of its routes, if it has none; replay compares them with the tokens of a pass.

        Args:
            ids: Token ids of the sequence, from its first token at least up to the token of the last row.

        Raises:
            RoutingError: There are too few ids, or the trace already has others.
        """
        known = torch.as_tensor(ids).flatten()[: self.start + self.rows].to(torch.int32)
        if len(known) < self.start + self.rows:
            raise RoutingError(
                f"{len(known)} token ids for a routing trace that ends before position {self.start + self.rows}; give those "
                "of the whole sequence."
            )
        if self.tokens is not None and not torch.equal(self.tokens.cpu(), known.cpu()):
            raise RoutingError("the routing trace is of other tokens than these; its ids were recorded with it.")
        return replace(self, tokens=known)

    def token_rows(self) -> TokenRows | None:
        """Return the tokens along the rows, or None if they are not known."""
        if self.tokens is None:
            return None
        starts = self.starts
        if starts is None:
            starts = torch.arange(len(self.tokens), device=self.tokens.device) == 0
        return TokenRows(ids=self.tokens[self.start :], starts=starts[self.start :])

    def sequence(self, first: int, last: int) -> RoutingTrace:
        """Return rows first to last - 1 as a separate sequence, whose first token is that of row `first`."""
        rows, tokens = self.slice(first, last), self.tokens
        own = None if tokens is None else tokens[self.start + first : self.start + last]
        return replace(rows, start=0, tokens=own, starts=None)

    def slice(self, first: int, last: int) -> RoutingTrace:
        """Return rows first to last - 1, without copying; `start` and `versions` are adapted."""
        if not 0 <= first <= last <= self.rows:
            raise RoutingError(f"rows {first}:{last} are outside a routing trace of {self.rows} rows.")
        kept, at = [], 0
        for part in self.parts:
            low, high = max(first - at, 0), min(last - at, len(part))
            if low < high:
                kept.append(part if (low, high) == (0, len(part)) else part[low:high])
            at += len(part)
        before = [version for row, version in self.versions if row <= first][-1]
        after = [(row - first, version) for row, version in self.versions if first < row < last]
        return replace(
            self,
            parts=tuple(kept) or (self.parts[0][:0],),
            start=self.start + first,
            versions=((0, before), *after),
            tokens=None if self.tokens is None else self.tokens[: self.start + last],
            starts=None if self.starts is None else self.starts[: self.start + last],
        )

    @classmethod
    def concat(cls, traces: Sequence[RoutingTrace]) -> RoutingTrace:
        """Join pieces of one sequence, without copying; the pieces come from several turns, or several policy versions.

        Args:
            traces: At least one trace; each starts at the position where the one before it ends.

        Raises:
            RoutingError: The pieces leave a gap or overlap, or come from different models or sequences.
        """
        if not traces:
            raise RoutingError("no routing traces to join.")
        head, at = traces[0], 0
        parts: list[Tensor] = []
        versions: list[tuple[int, int]] = []
        for index, trace in enumerate(traces):
            trace.expect_model(layers=head.layers, num_experts=head.num_experts, top_k=head.top_k)
            if trace.start != head.start + at:
                raise RoutingError(
                    f"piece {index} of a routing trace starts at position {trace.start}, the one before it ends before "
                    f"{head.start + at}; the two must be equal."
                )
            if trace.rows:
                parts += trace.parts
                versions += [(at + row, version) for row, version in trace.versions]
            at += trace.rows
        tokens = traces[-1].tokens if all(trace.tokens is not None for trace in traces) else None
        for index, trace in enumerate(traces if tokens is not None else ()):
            if tokens is not None and not torch.equal(_known(trace), tokens[: trace.start + trace.rows]):
                raise RoutingError(
                    f"piece {index} of a routing trace is of other tokens than the last; join one sequence's."
                )
        return replace(
            head,
            parts=tuple(parts) or head.parts,
            versions=run_lengths(versions) or head.versions,
            tokens=tokens,
            starts=None,
        )

    def same_as(self, other: RoutingTrace) -> bool:
        """Tell whether two traces have equal content, however it is divided into parts."""
        header = (self.layers, self.num_experts, self.start, self.versions, self.rows, self.top_k)
        if header != (other.layers, other.num_experts, other.start, other.versions, other.rows, other.top_k):
            return False
        if self.tokens is not None and other.tokens is not None:
            if not torch.equal(self.tokens, other.tokens.to(self.tokens.device)):
                return False
        mine = self.experts
        return torch.equal(mine, other.experts.to(mine.device))

    def expect_model(self, *, layers: Sequence[int], num_experts: int, top_k: int) -> None:
        """Check that the trace was recorded in a model of this shape.

        Raises:
            RoutingError: The shape differs; names the difference.
        """
        for name, mine, theirs in (
            ("MoE layers", self.layers, tuple(layers)),
            ("experts per layer", self.num_experts, num_experts),
            ("experts per token", self.top_k, top_k),
        ):
            if mine != theirs:
                raise RoutingError(
                    f"the routing trace has {name} {mine}, the model {theirs}; rollout engine and trainer must run the same "
                    "architecture."
                )

    def expect_version(self, version: int, *, allow_mixed: bool = False) -> None:
        """Check that all rows were recorded under one policy version.

        Args:
            version: The version that sampled the tokens.
            allow_mixed: Accept older versions too, as partial rollouts have.

        Raises:
            RoutingError: A row has another version; names the first such row.
        """
        for row, found in self.versions:
            if found != version and not (allow_mixed and found < version):
                raise RoutingError(
                    f"row {row} of a routing trace is of policy version {found}, expected {version}: its routes belong to other "
                    "weights; reset the engine's prefix cache after a weight update and generate again."
                )

    @classmethod
    def ingest(
        cls,
        array: Any,
        *,
        num_experts: int,
        layers: Sequence[int],
        tokens: int | Sequence[int] | Tensor,
        version: int,
        request: str,
        top_k: int | None = None,
        start: int = 0,
        last_row: bool | None = None,
    ) -> RoutingTrace:
        """Check the routes that an engine recorded for one sequence, and store them in the narrowest dtype.

        Args:
            array: Expert ids `[rows, layers, K]`, any integer dtype, numpy or torch. The layer axis has only the MoE layers, or
                all decoder layers; then the dense ones, which must be all zero, are dropped. The array is copied; the result
                is on the CPU.
            num_experts: Experts per layer.
            layers: Absolute indices of the MoE layers.
            tokens: Token ids of prompt and response, which a replayed pass must have. Or only their number; then `of_tokens`
                must add the ids later.
            version: Policy version that sampled.
            request: Name of the request, for messages.
            top_k: Experts per token, if known.
            start: Position of the first recorded token.
            last_row: Whether the last token has a row: True for a full forward pass, False for an engine, which never feeds
                the last sampled token to the model; None allows both.

        Raises:
            RoutingError: Wrong shape, missing or surplus rows, ids out of range, duplicate ids, an all-zero layer (for K = 1
                only from 64 rows on), or routes in a dense layer; names request, row and layer.
        """
        experts = checked(
            array,
            num_experts=num_experts,
            layers=tuple(layers),
            tokens=tokens if isinstance(tokens, int) else len(tokens),
            request=request,
            top_k=top_k,
            start=start,
            last_row=last_row,
        )
        trace = cls(
            parts=(experts,), layers=tuple(layers), num_experts=num_experts, start=start, versions=((0, version),)
        )
        return trace if isinstance(tokens, int) else trace.of_tokens(tokens)


def run_lengths(stamps: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Drop the stamps (first row, policy version) that repeat the version before them."""
    kept: list[tuple[int, int]] = []
    for row, version in stamps:
        if not kept or kept[-1][1] != version:
            kept.append((row, version))
    return tuple(kept)


def _known(trace: RoutingTrace) -> Tensor:
    assert trace.tokens is not None
    return trace.tokens
