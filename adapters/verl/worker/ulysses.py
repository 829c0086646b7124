"""Ulysses sequence parallelism: which rows of a packed micro-batch a rank's model sees, and all of them put together again.

verl cuts the packed row, filled up to a multiple of the ranks, into equal pieces. Only attention sees tokens of other pieces.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from verl.utils.ulysses import (
    get_ulysses_sequence_parallel_group,
    get_ulysses_sequence_parallel_rank,
    get_ulysses_sequence_parallel_world_size,
)

from mismatch_ext.routing import RoutingTrace
from mismatch_ext.routing.tokens import TokenRows
from mismatch_ext.routing.trace import run_lengths


@dataclass(frozen=True, kw_only=True)
class Share:
    """The piece of a packed row that a rank's model sees.

    Args:
        rank: This rank's place among those that share a row.
        ranks: How many they are.
    """

    rank: int = 0
    ranks: int = 1

    @classmethod
    def present(cls) -> Share:
        """Return the share of this process in the pass that runs."""
        ranks = get_ulysses_sequence_parallel_world_size()
        return cls() if ranks == 1 else cls(rank=get_ulysses_sequence_parallel_rank(), ranks=ranks)

    def filling(self, rows: int) -> int:
        """Return how many rows of padding a packed row needs to be cut into equal pieces."""
        return -rows % self.ranks

    def rows(self, values: Tensor) -> Tensor:
        """Return this rank's piece of values that have one entry for each row `[R, ...]`."""
        size = len(values) // self.ranks
        return values[self.rank * size : (self.rank + 1) * size]

    def tokens(self, rows: TokenRows) -> TokenRows:
        """Return the tokens of this rank's piece; the rank's model sees its first token as the start of a sequence."""
        if self.ranks == 1:
            return rows
        return replace(rows, ids=self.rows(rows.ids), starts=_begun(self.rows(rows.starts)))

    def trace(self, trace: RoutingTrace) -> RoutingTrace:
        """Return the routes of this rank's piece."""
        if self.ranks == 1:
            return trace
        assert trace.tokens is not None and trace.starts is not None
        experts = self.rows(torch.cat(trace.parts))
        starts = _begun(self.rows(trace.starts))
        stamps = trace.versions
        if len(stamps) > 1:
            stamps = run_lengths(enumerate(self.rows(trace.version_by_row()).tolist()))
        return replace(trace, parts=(experts,), versions=stamps, tokens=self.rows(trace.tokens).clone(), starts=starts)

    def whole(self, values: Tensor) -> Tensor:
        """Return all ranks' pieces in the order of the packed row; all of them must call this."""
        if self.ranks == 1:
            return values
        pieces = [torch.empty_like(values) for _ in range(self.ranks)]
        dist.all_gather(pieces, values.contiguous(), group=get_ulysses_sequence_parallel_group())
        return torch.cat(pieces)


def _begun(starts: Tensor) -> Tensor:
    starts = starts.clone()
    starts[:1] = True
    return starts
