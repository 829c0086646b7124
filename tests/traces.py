"""What routing traces occupy, and whether two are the same."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from mismatch_ext.routing import RoutingTrace


def traces_nbytes(traces: Iterable[RoutingTrace]) -> int:
    """Return the bytes that traces occupy together, with shared parts counted once."""
    seen = {(part.data_ptr(), part.nbytes): part.nbytes for trace in traces for part in trace.parts}
    return sum(seen.values())


def same(one: RoutingTrace, other: RoutingTrace) -> bool:
    """Tell whether two traces have equal content, however it is divided into parts."""
    if one.tokens is not None and other.tokens is not None and not torch.equal(one.tokens, other.tokens):
        return False
    fields = ("layers", "num_experts", "start", "versions", "top_k")
    header = all(getattr(one, name) == getattr(other, name) for name in fields)
    return header and torch.equal(one.experts, other.experts)
