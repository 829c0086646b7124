"""Stores the routes of a prompt once, for all of its completions."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mismatch_ext.errors import RoutingError
from mismatch_ext.routing.trace import RoutingTrace


@dataclass(frozen=True, kw_only=True, eq=False)
class Shared:
    """The result of `share_prompts`.

    Args:
        traces: The traces, with the same content and in the same order.
        shared: Number of traces that use the prompt rows of an earlier trace.
        differing: Number of traces that keep their own prompt rows although an earlier completion of the prompt has recorded
            rows, because the engine routed the same prompt in two ways.
    """

    traces: list[RoutingTrace]
    shared: int
    differing: int


def share_prompts(
    traces: Sequence[RoutingTrace], prompt_lengths: Sequence[int], groups: Sequence[Hashable] | None = None
) -> Shared:
    """Store the prompt rows of each group of completions once, if they are bit-equal.

    If rows differ, for example because the engine computed the same prompt in two batches, each trace keeps its own.

    Args:
        traces: One per completion.
        prompt_lengths: Number of tokens of each completion's prompt.
        groups: Key of each completion's prompt, for example its token ids as a tuple; None puts all into one group.

    Raises:
        RoutingError: The sequences differ in length.
    """
    keys: Sequence[Hashable] = [0] * len(traces) if groups is None else groups
    if not len(traces) == len(prompt_lengths) == len(keys):
        raise RoutingError(
            f"{len(traces)} routing traces, {len(prompt_lengths)} prompt lengths and {len(keys)} groups; allowed: one of each "
            "per completion."
        )
    seen: dict[Hashable, list[Tensor]] = {}
    result = []
    shared = differing = 0
    for trace, length, group in zip(traces, prompt_lengths, keys, strict=True):
        rows = min(max(length - trace.start, 0), trace.rows)
        if not rows:
            result.append(trace)
            continue
        key = (group, trace.start, trace.layers, trace.num_experts)
        variants = seen.setdefault(key, [])
        prompt = trace.slice(0, rows).experts
        kept = next((variant for variant in variants if _equal(variant, prompt)), None)
        shared += kept is not None
        differing += kept is None and bool(variants)
        if kept is None:
            # Copy, because a view would keep the whole recording in memory, including the response rows.
            kept = prompt.clone()
            variants.append(kept)
        own = tuple(part.clone() for part in trace.slice(rows, trace.rows).parts if len(part))
        result.append(replace(trace, parts=(kept, *own)))
    return Shared(traces=result, shared=shared, differing=differing)


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.device == b.device and a.shape == b.shape and torch.equal(a, b)
