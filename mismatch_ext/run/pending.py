"""Metrics that a loop measures between two logs, and how they are merged over steps and ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from mismatch_ext.ranks import Ranks
from mismatch_ext.verdicts import Verdicts


class Pending:
    """Keeps the metrics of a training split until they are logged."""

    def __init__(self) -> None:
        self._values: dict[str, list[tuple[float, float]]] = {}

    def note(self, name: str, value: float, weight: float = 1.0) -> None:
        """Keep a value of a metric, in addition to its earlier values; the weight is the number of things it is a mean over."""
        self._values.setdefault(name, []).append((value, weight))

    def take(self) -> dict[str, float]:
        """Return one value per metric and begin anew: the extreme for a name in `_max` or `_min`, otherwise the weighted mean."""
        values, self._values = self._values, {}
        return {name: _merged(name, found) for name, found in values.items()}


def means_of_ranks(metrics: dict[str, float], names: Sequence[str], ranks: Ranks) -> dict[str, float]:
    """Return the means over ranks of metrics that each rank measured on its own part of the batch; all ranks must call it.

    Args:
        metrics: This rank's metrics.
        names: Names of the metrics to average; one that no rank has is left out.
        ranks: The processes that train together.
    """
    if ranks.size == 1:
        return {}
    said = ranks.gather({name: metrics[name] for name in names if name in metrics})
    values = {name: [own[name] for own in said if name in own] for name in names}
    return {name: sum(found) / len(found) for name, found in values.items() if found}


def findings_of_ranks(verdicts: Verdicts, ranks: Ranks) -> None:
    """Bring the findings of all ranks under `observe` to the main process, which writes them; all ranks must call it."""
    if not verdicts.observes or ranks.size == 1:
        return
    mine = [] if ranks.rank == 0 else verdicts.take()
    for findings in ranks.gather(mine):
        if ranks.rank == 0:
            verdicts.add(findings, said=True)


def number(value: Any) -> float:
    """Return a number as a float, or the mean of a tensor."""
    return float(value.detach().float().mean()) if isinstance(value, Tensor) else float(value)


def _merged(name: str, entries: Sequence[tuple[float, float]]) -> float:
    values = [value for value, _ in entries]
    if name.endswith(("_max", "_min")):
        return max(values) if name.endswith("_max") else min(values)
    total = sum(weight for _, weight in entries)
    return sum(value * weight for value, weight in entries) / total if total else sum(values) / len(values)
