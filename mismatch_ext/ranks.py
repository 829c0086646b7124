"""The processes that train together: the protocol for measuring over all of them, and how they agree on an error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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
        """Return the sum of a tensor, which may be on the CPU, over all processes; all of them must call it."""


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
        if self.size == 1:
            return values
        # NCCL takes no tensors of the CPU.
        total = (values.cuda() if dist.get_backend() == "nccl" else values).clone()
        dist.all_reduce(total)
        return total.to(values.device)


WORLD = WorldRanks()


def agree(error: Exception | None, ranks: Ranks = WORLD) -> None:
    """Raise on every rank if one rank failed, because the others would wait for it in a collective; all ranks must call this.

    Args:
        error: The error of this rank; None if it has not failed.
        ranks: The processes that train together.

    Raises:
        MismatchError: An error of the first failed rank's class, which names that rank. A failed rank raises its own error.
    """
    told = error
    if error is not None and not isinstance(error, MismatchError):  # it may be of a class that cannot be sent
        told = MismatchError(f"{type(error).__name__}: {error}")
    for rank, found in enumerate(ranks.gather(told)):
        if found is not None:
            raise error if error is not None else type(found)(f"rank {rank}: {found}")


@contextmanager
def together(ranks: Ranks) -> Iterator[None]:
    """Run this rank's part of what all ranks do; if it fails on one rank, raise on all of them, as `agree` does."""
    error: Exception | None = None
    try:
        yield
    except Exception as found:  # noqa: BLE001  # whatever it is, the other ranks must not wait
        error = found
    agree(error, ranks)
