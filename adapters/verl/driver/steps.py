"""The metrics of a step that makes several local updates between two weight updates.

verl combines such a step's metrics by parts of their names: "sum" and "total" are summed, "max" and "min" likewise, and
everything else is averaged, counts too. This package's metrics are taken out before, and each is combined as its kind requires.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import MutableMapping
from typing import Any

from mismatch_ext.names import PREFIX

LAST = frozenset(
    {
        *("kl_coef", "loss_scale", "overflow_steps", "overflow_streak", "overflow_frac"),
        *("lr_multiplier", "lr_surges", "lr_surge_step", "lr_surge_threshold", "lr_period"),
    }
)
"""Metrics whose value after the last update holds for the step: settings, and counts since training began."""
SUMS = frozenset({"skipped_steps", "other_passes", "compared_tokens"})
"""Counts of one update, which are summed."""


class StepMetrics:
    """This package's metrics of a step, collected from each of its local updates."""

    def __init__(self) -> None:
        self._found: dict[str, list[tuple[float, int]]] = defaultdict(list)

    def take(self, metrics: MutableMapping[str, Any], samples: int) -> None:
        """Take this package's metrics out of those of a local update, in place; `samples` is how many the update learned from."""
        for name in [name for name in metrics if name.startswith(PREFIX)]:
            self._found[name].append((float(metrics.pop(name)), samples))

    def result(self) -> dict[str, float]:
        """Return the metrics of the step."""
        return {name: _together(name, found) for name, found in self._found.items()}


def _together(name: str, found: list[tuple[float, int]]) -> float:
    """Return a metric's value for the step from its values in several updates."""
    values, leaf = [value for value, _ in found], name.rpartition("/")[2]
    if len(values) == 1 or leaf in LAST:
        return values[-1]
    if leaf in SUMS:
        return sum(values)
    if leaf.endswith("_max"):
        return max(values)
    if leaf.endswith("_min"):
        return min(values)
    total = sum(samples for _, samples in found)
    return sum(value * samples for value, samples in found) / total if total else sum(values) / len(values)
