"""Placement of traces along the positions of a batch, in the order in which a forward pass flattens them.

Shapes: B rows of a batch, S positions, L MoE layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from mismatch_ext.errors import RoutingError
from mismatch_ext.routing.tokens import ANY, PADDING
from mismatch_ext.routing.trace import RoutingTrace, run_lengths


def align(traces: Sequence[RoutingTrace], attention_mask: Tensor) -> tuple[RoutingTrace, Tensor]:
    """Lay one trace per row along a padded batch, left- or right-padded or both, for routing replay (R3, arXiv 2510.11370).

    Args:
        traces: One per row.
        attention_mask: 1 for tokens that are not padding `[B, S]`; a row's tokens, in order, are its sequence.

    Returns:
        A trace of B * S rows, row after row of the batch, and a mask `[B * S]` that is True where a route was recorded. The
        other positions (padding, the last sampled token, a prompt whose rows were left out) hold experts 0 to K - 1, which are
        not used because of the mask; their version is that of the position before. The trace knows the tokens of its rows if
        all given traces do.

    Raises:
        RoutingError: The number of traces or their rows do not fit, a row has padding between its tokens, or the traces come
            from different models.
    """
    if attention_mask.dim() != 2 or len(traces) != len(attention_mask) or not attention_mask.numel():
        raise RoutingError(
            f"{len(traces)} routing traces for an attention mask of shape {tuple(attention_mask.shape)}; allowed: one trace per "
            "row of [B, S]."
        )
    real = attention_mask.detach().to(device="cpu", dtype=torch.bool)
    width, tokens, firsts = real.shape[1], real.sum(1), real.to(torch.uint8).argmax(1)
    positions = torch.arange(width)
    inside = (positions >= firsts[:, None]) & (positions < (firsts + tokens)[:, None])
    apart = (real != inside).any(1)
    if apart.any():
        raise RoutingError(
            f"row {int(apart.to(torch.uint8).argmax())}: there is padding between its tokens in the attention mask; pad left or "
            "right only."
        )
    places = [row * width + first for row, first in enumerate(firsts.tolist())]
    return _lay(traces, places, tokens.tolist(), real.numel())


def align_packed(traces: Sequence[RoutingTrace], lengths: Sequence[int]) -> tuple[RoutingTrace, Tensor]:
    """Lay traces along a packed row, sequence after sequence, by the number of tokens of each; otherwise as `align`."""
    if len(traces) != len(lengths) or not traces:
        raise RoutingError(
            f"{len(traces)} routing traces for {len(lengths)} packed sequences; allowed: one per sequence."
        )
    *places, positions = accumulate(lengths, initial=0)
    return _lay(traces, places, lengths, positions)


def _lay(
    traces: Sequence[RoutingTrace],
    places: Sequence[int],
    tokens: Sequence[int],
    positions: int,
) -> tuple[RoutingTrace, Tensor]:
    """Join the traces in their order, with fillers between them; places must ascend."""
    head, block = traces[0], traces[0].parts[0]
    filler = torch.arange(head.top_k, dtype=torch.int32, device=block.device).to(block.dtype)
    filler = filler.expand(positions, len(head.layers), -1)
    experts: list[Tensor] = []
    recorded = torch.zeros(positions, dtype=torch.bool)
    ids = torch.full((positions,), PADDING, dtype=torch.int32)
    starts = torch.zeros(positions, dtype=torch.bool)
    sequences = [(place, place + count - 1) for place, count in zip(places, tokens, strict=True) if count]
    starts[[first for first, _ in sequences]] = True
    ids[[last for _, last in sequences]] = ANY  # the last sampled token, whose id affects no other route
    stamps: list[tuple[int, int]] = []
    end = 0  # of the rows so far
    for row, (trace, place, count) in enumerate(zip(traces, places, tokens, strict=True)):
        _check_fit(row, trace, head, count)
        if trace.tokens is not None:
            ids[place : place + trace.start + trace.rows] = trace.tokens
        if not trace.rows:
            continue
        at = place + trace.start
        stamps += [(at + first, version) for first, version in trace.versions]
        experts += [filler[end:at], *trace.parts]
        end = at + trace.rows
        recorded[at:end] = True
    stamps[:1] = [(0, stamps[0][1] if stamps else head.versions[0][1])]
    known = all(trace.tokens is not None for trace in traces)
    aligned = RoutingTrace(
        parts=(torch.cat([*experts, filler[end:]]),),
        layers=head.layers,
        num_experts=head.num_experts,
        versions=run_lengths(stamps),
        tokens=ids if known else None,
        starts=starts if known else None,
    ).to(block.device)
    return aligned, recorded.to(block.device)


def _check_fit(row: int, trace: RoutingTrace, head: RoutingTrace, tokens: int) -> None:
    if (trace.layers, trace.num_experts, trace.top_k) != (head.layers, head.num_experts, head.top_k):
        raise RoutingError(
            f"row {row}: its routing trace has {trace.top_k} of {trace.num_experts} experts in layers {trace.layers}, that of "
            f"row 0 has {head.top_k} of {head.num_experts} in layers {head.layers}; align traces of one model."
        )
    end = trace.start + trace.rows
    if end not in (max(tokens - 1, 0), tokens):
        raise RoutingError(
            f"row {row}: its routing trace has {trace.rows} rows from position {trace.start} on and ends before {end}, but the "
            f"row has {tokens} tokens; allowed: an end before {max(tokens - 1, 0)} (engine: no row for the last sampled token) "
            f"or {tokens} (a full forward pass). Is it the trace of another row, or are tokens masked out of the attention mask?"
        )
