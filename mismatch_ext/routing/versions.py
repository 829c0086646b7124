"""Which weights the routes of one sequence were recorded with, as the engine that sampled it says."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mismatch_ext.errors import RoutingError
from mismatch_ext.routing.trace import RoutingTrace, run_lengths

Span = tuple[int, int]
"""Versions of the weights at a sequence's first and last token."""


def stamped(
    trace: RoutingTrace, span: Span | None, sent: int | None, request: str, *, older: bool = False
) -> RoutingTrace:
    """Return routes with the versions of the weights that they are of.

    Args:
        trace: The routes of one sequence.
        span: What its engine says; None when nobody does.
        sent: Version that the engine was sent last; None where that is unknown, and any is taken.
        request: Name of the request, for messages.
        older: Accept routes of older weights, and of several, as an asynchronous host replays.

    Raises:
        RoutingError: They are of other weights than were sent last, or nobody says of which.
    """
    if span is None:
        if sent is None:
            return trace
        raise RoutingError(
            f"request {request}: nobody says which weights its routes were recorded with; whatever hands on the engine's answers "
            "must hand on the version that they come with (of verl's agent loops, extra_fields with min_global_steps and "
            "max_global_steps)."
        )
    first, last = span
    # At which row the weights changed, nobody says.
    stamps = [(0, first), (trace.rows - 1, last)] if trace.rows > 1 else [(0, last)]
    trace = replace(trace, versions=run_lengths(stamps))
    if sent is not None:
        try:
            trace.expect_version(sent, allow_mixed=older)
        except RoutingError as error:
            raise RoutingError(f"request {request}: {error}") from None
    return trace


def by_row(trace: RoutingTrace) -> Tensor:
    """Return the version of the weights that each row of a trace is of `[rows]`, int64."""
    found = torch.empty(trace.rows, dtype=torch.int64)
    for first, version in trace.versions:
        found[first:] = version
    return found
