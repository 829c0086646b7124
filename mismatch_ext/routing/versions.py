"""The versions of the weights with which the routes of one sequence were recorded, as its engine reports them."""

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
    """Return routes with the versions of the weights that chose them.

    Args:
        trace: The routes of one sequence.
        span: Versions that the engine reports; None if nobody reports any.
        sent: Version that the engine was sent last; None if that is unknown, and any version is accepted.
        request: Name of the request, for messages.
        older: Accept routes of older weights, and of several versions, as an asynchronous host replays them.

    Raises:
        RoutingError: The routes come from other weights than were sent last, or nobody says from which.
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
    # Nobody says at which row the weights changed.
    stamps = [(0, first), (trace.rows - 1, last)] if trace.rows > 1 else [(0, last)]
    trace = replace(trace, versions=run_lengths(stamps))
    if sent is not None:
        try:
            trace.expect_version(sent, allow_mixed=older)
        except RoutingError as error:
            raise RoutingError(f"request {request}: {error}") from None
    return trace


def by_row(trace: RoutingTrace) -> Tensor:
    """Return the version of the weights that chose each row of a trace `[rows]`, int64."""
    found = torch.empty(trace.rows, dtype=torch.int64)
    for first, version in trace.versions:
        found[first:] = version
    return found
