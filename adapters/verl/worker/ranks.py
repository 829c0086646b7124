"""What ranks of a trainer must agree on; otherwise one waits in a collective for another that has failed."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from mismatch_ext.errors import MismatchError


def gathered(value: Any) -> list[Any]:
    """Return every rank's value, in the order of ranks; all ranks must call this."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def agree(error: MismatchError | None) -> None:
    """Raise on every rank what failed on one; all ranks must call this.

    Args:
        error: What failed on this rank, if anything.

    Raises:
        MismatchError: This rank's error, or else one of the class of the first other rank's, which names that rank.
    """
    for rank, found in enumerate(gathered(error)):
        if found is not None:
            raise error if error is not None else type(found)(f"rank {rank}: {found}")
