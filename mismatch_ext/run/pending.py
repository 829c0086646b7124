"""What a loop measures between two logs, and what is made of it over all the ranks that train together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from mismatch_ext.ranks import Ranks
from mismatch_ext.verdicts import Verdicts


class Pending:
    """Keeps the metrics of a training split until they are logged."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}

    def note(self, name: str, value: float) -> None:
        """Keep a value, beside those that were measured of the metric before."""
        self._values.setdefault(name, []).append(value)

    def take(self) -> dict[str, float]:
        """Return what is to be logged of each metric, and begin anew: the extreme of `_max` and `_min`, else the mean."""
        values, self._values = self._values, {}
        return {name: _merged(name, found) for name, found in values.items()}


def means_of_ranks(metrics: dict[str, float], names: Sequence[str], ranks: Ranks) -> dict[str, float]:
    """Return the means over ranks of those of the metrics that each rank has of its own part; on all ranks.

    Args:
        metrics: Of this rank.
        names: Metrics that are means over a rank's own part; one that no rank has is left out.
        ranks: The processes.
    """
    if ranks.size == 1:
        return {}
    said = ranks.gather({name: metrics[name] for name in names if name in metrics})
    values = {name: [own[name] for own in said if name in own] for name in names}
    return {name: sum(found) / len(found) for name, found in values.items() if found}


def findings_of_ranks(verdicts: Verdicts, ranks: Ranks) -> None:
    """Bring what the other ranks have found under `observe` to the main process, which writes it; on all ranks."""
    if not verdicts.observes or ranks.size == 1:
        return
    mine = [] if ranks.rank == 0 else verdicts.take()
    for findings in ranks.gather(mine):
        if ranks.rank == 0:
            verdicts.add(findings, said=True)


def number(value: Any) -> float:
    """Return a number, or the mean of a tensor."""
    return float(value.detach().float().mean()) if isinstance(value, Tensor) else float(value)


def _merged(name: str, values: Sequence[float]) -> float:
    if name.endswith(("_max", "_min")):
        return max(values) if name.endswith("_max") else min(values)
    return sum(values) / len(values)
