"""The processes that train together, as whatever measures over all of them asks for them."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch import Tensor


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
        """Return the value alone."""
        return [value]

    def sum(self, values: Tensor) -> Tensor:
        """Return the values as they are."""
        return values


ONE_PROCESS = OneProcess()
