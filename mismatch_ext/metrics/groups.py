"""The gap of a process's part of a batch, measured in that process, separately for groups of tokens.

The process sends only a state of a few kilobytes per group, whatever the number of tokens. The states can be merged in any order,
and then give the same measures as one process that has the whole batch.

Shapes: B rows; R places, which are the rows' tokens one row after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from mismatch_ext.errors import RecordError
from mismatch_ext.metrics.accumulator import MismatchAccumulator

TOGETHER = 1 << 20
"""Places that are measured together, because a large batch widened to float64 would take gigabytes."""


class GapGroups:
    """Accumulators by name, such as "train" and "train/native".

    Args:
        scatter_samples: Tokens of each group that are kept for a scatter plot.
        seed: Seed of that sample; it must differ between the processes of a run.
    """

    def __init__(self, *, scatter_samples: int = 0, seed: int = 0) -> None:
        self._scatter_samples, self._seed = scatter_samples, seed
        self._groups: dict[str, MismatchAccumulator] = {}

    def add(
        self,
        group: str,
        old_logprobs: Tensor,
        rollout_logprobs: Tensor,
        response_mask: Tensor,
        lengths: Tensor,
        chosen: Tensor | None = None,
    ) -> None:
        """Add rows to a group, a million places at a time.

        Args:
            group: The group's name.
            old_logprobs, rollout_logprobs, response_mask, lengths, chosen: As in `MismatchAccumulator.update_rows`.

        Raises:
            RecordError, NonFiniteLogprobError: As `MismatchAccumulator.update_rows`; row numbers count from the first row that
                was measured together with the named one.
        """
        accumulator = self._groups.get(group)
        if accumulator is None:
            accumulator = self._groups[group] = self._new()
        for rows, places in _parts(lengths):
            part = None if chosen is None else chosen[places]
            accumulator.update_rows(
                old_logprobs[places], rollout_logprobs[places], response_mask[places], lengths[rows], part
            )

    def merge(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Add what another process measured, from its `state_dict`.

        Raises:
            RecordError: A state has another version.
        """
        for name, state in states.items():
            part = self._new()
            part.load_state_dict(dict(state))
            if name in self._groups:
                self._groups[name].merge(part)
            else:
                self._groups[name] = part

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return each group's state as JSON-able data."""
        return {name: accumulator.state_dict() for name, accumulator in self._groups.items()}

    def scalars(self, group: str) -> dict[str, float]:
        """Return a group's measures; empty when it has no token."""
        accumulator = self._groups.get(group)
        return {} if accumulator is None or accumulator.is_empty else accumulator.compute().scalars

    def _new(self) -> MismatchAccumulator:
        return MismatchAccumulator(scatter_samples=self._scatter_samples, seed=self._seed + len(self._groups))


def _parts(lengths: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield blocks of rows, and their places: as many rows as fit `TOGETHER` places, but at least one."""
    counts = lengths.tolist()
    if any(count < 0 for count in counts):
        raise RecordError(f"lengths holds {min(counts)}; a row has a whole number of places >= 0.")
    first = place = 0
    while first < len(counts):
        last, places = first + 1, counts[first]
        while last < len(counts) and places + counts[last] <= TOGETHER:
            places += counts[last]
            last += 1
        yield slice(first, last), slice(place, place + places)
        first, place = last, place + places
