"""Where a token is: batch-first in a trace, sequence-first in Megatron, and cut up by sequence parallelism.

Shapes: B batch, S sequence, C = S / ranks the part of the sequence that one tensor-parallel rank holds. A packed
micro-batch is B = 1, for which both orders are one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def to_local(rows: Tensor, batch: int, rank: int, ranks: int) -> Tensor:
    """Pick this rank's rows `[C * B, ...]`, sequence-first, out of all rows `[B * S, ...]`, batch-first.

    Args:
        rows: Something per token of the micro-batch, row-major over `[B, S]`.
        batch: B.
        rank: Place in the tensor-parallel group; 0 without sequence parallelism.
        ranks: Size of that group; 1 without sequence parallelism.
    """
    grid = rows.view(batch, -1, *rows.shape[1:])
    part = grid.size(1) // ranks
    return grid[:, rank * part : (rank + 1) * part].transpose(0, 1).reshape(part * batch, *rows.shape[1:])


def to_batch_first(rows: Tensor, batch: int, group: Any, ranks: int) -> Tensor:
    """Gather every rank's rows `[C * B, ...]`, sequence-first, into all rows `[B * S, ...]`, batch-first.

    Args:
        rows: Something per token of this rank, row-major over `[C, B]`.
        batch: B.
        group: Process group that the sequence is divided over; not used when `ranks` is 1.
        ranks: Its size.
    """
    if ranks > 1:
        # As bytes: neither NCCL nor gloo knows uint16.
        local = rows.contiguous().view(torch.uint8)
        parts = [torch.empty_like(local) for _ in range(ranks)]
        torch.distributed.all_gather(parts, local, group=group)
        rows = torch.cat(parts).view(rows.dtype)
    return rows.view(-1, batch, *rows.shape[1:]).transpose(0, 1).flatten(0, 1)
