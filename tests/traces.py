"""What routing traces occupy."""

from __future__ import annotations

from collections.abc import Iterable

from mismatch_ext.routing import RoutingTrace


def traces_nbytes(traces: Iterable[RoutingTrace]) -> int:
    """Return the bytes that traces occupy together, with shared parts counted once."""
    seen = {(part.data_ptr(), part.nbytes): part.nbytes for trace in traces for part in trace.parts}
    return sum(seen.values())
