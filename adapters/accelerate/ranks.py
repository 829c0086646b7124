"""The ranks of a trainer, from its accelerator."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator, PartialState
from accelerate.utils import gather_object, reduce
from torch import Tensor


class AcceleratorRanks:
    """`Ranks` of an accelerator's processes.

    Args:
        accelerator: The Trainer's accelerator, or the state that it shares while there is no Trainer yet.
    """

    def __init__(self, accelerator: Accelerator | PartialState) -> None:
        self._accelerator = accelerator

    @property
    def rank(self) -> int:
        """Number of this process, from 0."""
        return int(self._accelerator.process_index)

    @property
    def size(self) -> int:
        """How many processes there are."""
        return int(self._accelerator.num_processes)

    def gather(self, value: Any) -> list[Any]:
        """Return every process's value, in the order of their ranks; all of them must call it."""
        return [value] if self.size == 1 else list(gather_object([value]))

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of a tensor over all processes; all of them must call it."""
        if self.size == 1:
            return values
        total: Tensor = reduce(values.to(self._accelerator.device), reduction="sum")
        return total.to(values.device)
