"""The experts that each token of a sequence was routed to: the record that goes from the rollout engine to the trainer.

Shapes: R rows (tokens with a recorded route), L MoE layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mismatch_ext.errors import RoutingError
from mismatch_ext.routing.ingest import checked, storage_dtype
from mismatch_ext.routing.tokens import TokenRows

Span = tuple[int, int]
"""Versions of the weights at a sequence's first and last token."""


@dataclass(frozen=True, kw_only=True)
class RoutingShape:
    """The shape of a model's routes; take it from the model that replays them (`moe_layout(model).shape`).

    An engine's answer does not contain it: SGLang sends bytes for all layers, and in vLLM's ids two swapped layers go unnoticed.
    """

    num_layers: int
    layers: tuple[int, ...]
    num_experts: int
    top_k: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        last = max(self.layers, default=0)
        ascending = list(self.layers) == sorted(set(self.layers)) and bool(self.layers)
        self._expect("num_experts", 1 <= self.num_experts <= 65536, "1 to 65536")
        self._expect("top_k", 1 <= self.top_k <= self.num_experts, f"1 to num_experts ({self.num_experts})")
        self._expect("layers", ascending and self.layers[0] >= 0, "ascending decoder indices >= 0, at least one")
        self._expect("num_layers", self.num_layers > last, f"more than {last}, the last MoE layer's index")

    def _expect(self, name: str, is_in_range: bool, allowed: str) -> None:
        if not is_in_range:
            value = getattr(self, name)
            raise RoutingError(f"routing shape {name}={value!r:.60} is out of range; allowed: {allowed}.")


@dataclass(frozen=True, kw_only=True, eq=False)
class RoutingTrace:
    """Expert ids of consecutive tokens, in the engine's slot order, for routing replay (R3, arXiv 2510.11370).

    `RolloutRecord` carries one of each response. `ingest` makes one of an engine's answer, and checks it.

    Args:
        parts: Blocks of rows `[rows, L, K]` in `storage_dtype(num_experts)`, at least one; the trace is their concatenation. A
            block may belong to several traces: the completions of a GRPO group share their prompt's rows.
        layers: Absolute decoder indices of the L MoE layers, ascending.
        num_experts: Experts per layer.
        start: Position of row 0 in the sequence; the prompt's length if its rows were left out.
        versions: Policy versions, run-length encoded: (first row, version), first rows ascending from 0. There are several
            entries if several versions of the policy contributed.
        tokens: Ids of the sequence's tokens, from its first token to that of the last row `[start + rows]`, int32. The routes
            belong only to a forward pass over these tokens. `PADDING` and `ANY` of `mismatch_ext.routing.tokens` may be among
            them. None if they are not known; the routes can then not be replayed.
        starts: True where a sequence begins, if there are several sequences `[start + rows]`, bool; None for one sequence.
    """

    parts: tuple[Tensor, ...]
    layers: tuple[int, ...]
    num_experts: int
    start: int = 0
    versions: tuple[tuple[int, int], ...] = ((0, 0),)
    tokens: Tensor | None = None
    starts: Tensor | None = None

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
        """Check the routes that an engine recorded for one sequence, and store a copy in the narrowest dtype, on the CPU.

        Args:
            array: Expert ids `[rows, layers, K]`, integers, numpy or torch; of the MoE layers, or of all decoder layers, whose
                dense ones must be all zero and are dropped.
            num_experts: Experts per layer.
            top_k: Experts per token, if known.
            layers: Absolute indices of the MoE layers.
            tokens: Token ids of prompt and response, which a replayed pass must have; or only their number, until `of_tokens`.
            version: Policy version that sampled.
            request: Name of the request, for messages.
            start: Position of the first recorded token.
            last_row: Whether the last token has a row, as in a full forward pass; no engine feeds it to the model. None: either.

        Raises:
            RoutingError: Wrong shape, missing or surplus rows, ids out of range, duplicate ids, an all-zero layer (for K = 1
                only from 64 rows on), or routes in a dense layer.
        """
        count = tokens if isinstance(tokens, int) else len(tokens)
        layers = tuple(layers)
        experts = checked(array, num_experts, layers, count, f"request {request}", top_k, start, last_row)
        trace = cls(parts=(experts,), layers=layers, num_experts=num_experts, start=start, versions=((0, version),))
        return trace if isinstance(tokens, int) else trace.of_tokens(tokens)

    @classmethod
    def unrouted(
        cls, tokens: Sequence[int] | Tensor, *, layers: Sequence[int], top_k: int, num_experts: int, version: int
    ) -> RoutingTrace:
        """Return a trace of a sequence without rows, which the model routes itself as it does padding.

        Args:
            tokens: Token ids of prompt and response.
            layers: Absolute indices of the MoE layers.
            top_k: Experts per token.
            num_experts: Experts per layer.
            version: Policy version that sampled.
        """
        nothing = torch.zeros(0, len(layers), top_k, dtype=storage_dtype(num_experts))
        trace = cls(
            parts=(nothing,),
            layers=tuple(layers),
            num_experts=num_experts,
            # The last token has no row in any trace of an engine's.
            start=max(len(tokens) - 1, 0),
            versions=((0, version),),
        )
        return trace.of_tokens(tokens)

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
        return self.parts[0].shape[-1]

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

    def layer(self, layer: int) -> Tensor:
        """Return the expert ids of a decoder layer `[rows, K]`, int64; only here ids are widened."""
        index = self.layers.index(layer)
        narrow = [part[:, index] for part in self.parts]
        ids = narrow[0] if len(narrow) == 1 else torch.cat(narrow)
        return ids.to(torch.int64)

    def to(self, device: torch.device | str) -> RoutingTrace:
        """Return the trace on a device; parts that are already there are not copied."""
        return replace(
            self,
            parts=tuple(part.to(device) for part in self.parts),
            tokens=None if self.tokens is None else self.tokens.to(device),
            starts=None if self.starts is None else self.starts.to(device),
        )

    def of_tokens(self, ids: Sequence[int] | Tensor) -> RoutingTrace:
        """Return the trace with its sequence's ids, which replay compares with a pass; raises RoutingError if they do not fit."""
        end = self.start + self.rows
        tokens = torch.as_tensor(ids).flatten()[:end].to(torch.int32)
        if len(tokens) < end:
            raise RoutingError(
                f"{len(tokens)} token ids for a routing trace that ends before position {end}; give the whole sequence's."
            )
        if self.tokens is not None and not torch.equal(self.tokens.cpu(), tokens.cpu()):
            raise RoutingError("the routing trace is of other tokens than these; its ids were recorded with it.")
        return replace(self, tokens=tokens)

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
        tokens = None if self.tokens is None else self.tokens[self.start + first : self.start + last]
        return replace(self.slice(first, last), start=0, tokens=tokens, starts=None)

    def slice(self, first: int, last: int) -> RoutingTrace:
        """Return rows first to last - 1, without copying; `start` and `versions` are adapted."""
        before = [version for row, version in self.versions if row <= first][-1]
        after = [(row - first, version) for row, version in self.versions if first < row < last]
        return replace(
            self,
            parts=self._parts(first, last) or (self.parts[0][:0],),
            start=self.start + first,
            versions=((0, before), *after),
            tokens=None if self.tokens is None else self.tokens[: self.start + last],
            starts=None if self.starts is None else self.starts[: self.start + last],
        )

    def _parts(self, first: int, last: int) -> tuple[Tensor, ...]:
        """Return the blocks of rows first to last - 1, without copying; those without rows are left out."""
        parts, at = [], 0
        for part in self.parts:
            low, high = max(first - at, 0), min(last - at, len(part))
            if low < high:
                parts.append(part[low:high] if high - low < len(part) else part)
            at += len(part)
        return tuple(parts)

    @classmethod
    def concat(cls, traces: Sequence[RoutingTrace]) -> RoutingTrace:
        """Join pieces of one sequence, of several turns or versions, without copying; raises RoutingError if they do not fit."""
        head, end, whole = traces[0], traces[0].start, traces[-1].tokens
        parts: list[Tensor] = []
        versions: list[tuple[int, int]] = []
        if any(trace.tokens is None for trace in traces):
            whole = None
        for index, trace in enumerate(traces):
            trace.expect_model(layers=head.layers, num_experts=head.num_experts, top_k=head.top_k)
            if trace.start != end:
                raise RoutingError(
                    f"piece {index} of a routing trace starts at position {trace.start}, the one before it ends before {end}; "
                    "the two must be equal."
                )
            if trace.rows:
                parts += trace.parts
                versions += [(end - head.start + row, version) for row, version in trace.versions]
            end += trace.rows
            if whole is not None and not torch.equal(trace.tokens, whole[:end]):  # type: ignore[arg-type]
                raise RoutingError(
                    f"piece {index} of a routing trace is of other tokens than the last; join one sequence's."
                )
        return replace(
            head,
            parts=tuple(parts) or head.parts,
            versions=run_lengths(versions) or head.versions,
            tokens=whole,
            starts=None,
        )

    def expect_model(self, *, layers: Sequence[int], num_experts: int, top_k: int) -> None:
        """Refuse a trace that was recorded in a model of another shape."""
        for name, recorded, expected in (
            ("MoE layers", self.layers, tuple(layers)),
            ("experts per layer", self.num_experts, num_experts),
            ("experts per token", self.top_k, top_k),
        ):
            if recorded != expected:
                raise RoutingError(
                    f"the routing trace has {name} {recorded}, the model {expected}; rollout engine and trainer must run the "
                    "same architecture."
                )


def run_lengths(stamps: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Drop the stamps (first row, policy version) that repeat the version before them."""
    changes: list[tuple[int, int]] = []
    for row, version in stamps:
        if not changes or changes[-1][1] != version:
            changes.append((row, version))
    return tuple(changes)


def expect_weights(span: Span | None, sent: int | None, request: str, *, older: bool = False) -> int | None:
    """Return the version of the weights that chose a sequence's first routes, which the engine reports; None if nobody says.

    Nobody says at which token of a sequence the weights changed. `sent` is the version that the engine was sent last; without it
    any is accepted, and with `older` all up to it, as an asynchronous host replays them. Raises RoutingError for routes of other
    weights, or if they are unknown.
    """
    if span is None:
        if sent is None:
            return None
        raise RoutingError(
            f"request {request}: nobody says which weights its routes were recorded with; whatever hands on the engine's answers "
            "must hand on the version that they come with (of verl's agent loops, extra_fields with min_global_steps and "
            "max_global_steps)."
        )
    for version in span:
        if sent is not None and version != sent and not (older and version < sent):
            raise RoutingError(
                f"request {request}: its routes are of weight versions {span[0]} to {span[1]}, expected {sent}; reset the "
                "engine's prefix cache after a weight update and generate again."
            )
    return span[0]


def share_prompts(
    traces: Sequence[RoutingTrace], prompt_lengths: Sequence[int], groups: Sequence[Hashable]
) -> list[RoutingTrace]:
    """Store the prompt rows of each group of completions once, if they are bit-equal; a trace with others keeps its own."""
    prompts: dict[Hashable, list[Tensor]] = {}
    sharing = []
    for trace, length, group in zip(traces, prompt_lengths, groups, strict=True):
        rows = min(max(length - trace.start, 0), trace.rows)
        if not rows:
            sharing.append(trace)
            continue
        variants = prompts.setdefault((group, trace.start, trace.layers, trace.num_experts), [])
        found = trace._parts(0, rows)
        prompt = found[0] if len(found) == 1 else torch.cat(found)
        block = next((variant for variant in variants if torch.equal(variant, prompt)), None)
        if block is None:
            # Copy, because a view would keep the whole recording in memory, including the response rows.
            block = prompt.clone()
            variants.append(block)
        response = tuple(part.clone() for part in trace._parts(rows, trace.rows))
        sharing.append(replace(trace, parts=(block, *response)))
    return sharing
