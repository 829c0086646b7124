"""The processes that train together: the protocol for measuring over all of them, and how they agree on an error."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch.distributed as dist
from torch import Tensor

from mismatch_ext.errors import MismatchError


@runtime_checkable
class Ranks(Protocol):
    """The processes that train together."""

    @property
    def rank(self) -> int:
        """Number of this process, from 0."""

    @property
    def size(self) -> int:
        """How many there are."""

    def gather(self, value: Any) -> list[Any]:
        """Return every process's value, in the order of their ranks; all of them must call it."""

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of a tensor over all processes; all of them must call it."""


class OneProcess:
    """`Ranks` of a trainer in one process."""

    rank = 0
    size = 1

    def gather(self, value: Any) -> list[Any]:
        """Return a list of this one value."""
        return [value]

    def sum(self, values: Tensor) -> Tensor:
        """Return the values as they are."""
        return values


ONE_PROCESS = OneProcess()


def gathered(value: Any) -> list[Any]:
    """Return every rank's value, in the order of ranks; all ranks must call this."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def agree(error: MismatchError | None) -> None:
    """Raise on every rank if one rank failed, because the others would wait for it in a collective; all ranks must call this.

    Args:
        error: The error of this rank; None if it has not failed.

    Raises:
        MismatchError: This rank's error; otherwise an error of the same class as the first failed rank's, which names that rank.
    """
    for rank, found in enumerate(gathered(error)):
        if found is not None:
            raise error if error is not None else type(found)(f"rank {rank}: {found}")


class WorldRanks:
    """`Ranks` of the processes of torch.distributed's world."""

    @property
    def rank(self) -> int:
        """Number of this process, from 0."""
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def size(self) -> int:
        """How many there are."""
        return dist.get_world_size() if dist.is_initialized() else 1

    def gather(self, value: Any) -> list[Any]:
        """Return every process's value, in the order of their ranks; all of them must call it."""
        return gathered(value)

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of a tensor over all processes; all of them must call it."""
        total = values.clone()
        if self.size > 1:
            dist.all_reduce(total)
        return total


WORLD = WorldRanks()
