"""Summarises a run's earlier steps if there are too many to keep: all sums that a report needs, and extremes for its plots.

Memory depends on the number of metrics, not on the number of steps. Sums, counts and maxima cover every step. A curve is kept as
at most `STRETCHES` stretches of equally many steps. Each stretch has its smallest value, its largest value and the first step at
which the value was not finite, so that no peak is lost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mismatch_ext.host_names import PREFIX
from mismatch_ext.metrics.names import PARTS_OF_STALE

NATIVE = "native/"
KINDS = (NATIVE, *(f"{PARTS_OF_STALE[0]}{source}/" for source in ("batch", "buffer", "kept")), *PARTS_OF_STALE)
"""Prefixes of figures over other tokens, or from another pass, than the gap; each prefix has its own count of tokens."""
# Metric -> the count that weights it; tokens by default. None means a plain mean over steps: ESS describes one batch.
ROUTING_WEIGHT = "routing/compared_tokens"
WEIGHTS = {"seq_kl": "sequences", "seq_k3_kl": "sequences", "ess_token": None, "ess_seq": None, "source": None}
FALLING = (PREFIX + "loss_scale",)
"""Metrics whose every fall is noted."""
STRETCHES = 1024
FIRST = 5
"""This many values are kept from the beginning, for the means at both ends of a run."""


def weight_of(column: str) -> str | None:
    """Return the metric that weights the steps in a metric's mean over the run; None for a plain mean.

    Args:
        column: Name of the metric without "mismatch/".
    """
    kind = next((kind for kind in KINDS if column.startswith(kind)), "")
    plain = column.removeprefix(kind)
    count_name = WEIGHTS.get(plain, ROUTING_WEIGHT if plain.startswith("routing/") else "tokens")
    if count_name and plain != column:
        count_name = kind + count_name
    return f"{PREFIX}{count_name}" if count_name else None


@dataclass
class Stretches:
    """A curve in stretches of `width` values; each keeps (step, value) of its extremes, and the step of its first gap."""

    width: int = 4
    count: int = 0
    kept: list[list[tuple[int, float] | int | None]] = field(default_factory=list)

    def add(self, steps: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        """Add values in the order of their steps; NaN stands for a value that was not finite."""
        begun = self.count % self.width
        head = min(self.width - begun, len(steps)) if begun else 0
        if head:
            self.kept[-1] = _merged(self.kept[-1], _extremes(steps[None, :head], values[None, :head])[0])
        whole = head + (len(steps) - head) // self.width * self.width
        rows = (-1, self.width)
        self.kept += _extremes(steps[head:whole].reshape(rows), values[head:whole].reshape(rows))
        if whole < len(steps):
            self.kept += _extremes(steps[None, whole:], values[None, whole:])
        self.count += len(steps)
        while len(self.kept) > STRETCHES:
            # Merge neighbours in pairs; a last stretch without a neighbour becomes the beginning of a wider one.
            pairs = zip(self.kept[::2], [*self.kept[1::2], _NOTHING], strict=False)
            self.kept = [_merged(a, b) for a, b in pairs]
            self.width *= 2

    def points(self) -> list[tuple[int, float | None]]:
        """Return steps and values, None at a gap, in the order of steps."""
        found: dict[int, float | None] = {}
        for low, high, gap in self.kept:
            found |= {one[0]: one[1] for one in (low, high) if isinstance(one, tuple)}
            if isinstance(gap, int):
                found[gap] = None
        return sorted(found.items())


_NOTHING: list[tuple[int, float] | int | None] = [None, None, None]


def _extremes(steps: NDArray[np.int64], values: NDArray[np.float64]) -> list[list[tuple[int, float] | int | None]]:
    """Return for each row `[R, width]` (step, value) of the smallest and of the largest, and the step of the first NaN."""
    if not len(values):
        return []
    gaps, rows = np.isnan(values), np.arange(len(values))
    low, high = np.where(gaps, np.inf, values).argmin(1), np.where(gaps, -np.inf, values).argmax(1)
    found: list[list[tuple[int, float] | int | None]] = [
        [one, other, None]
        for one, other in zip(
            zip(steps[rows, low].tolist(), values[rows, low].tolist(), strict=True),
            zip(steps[rows, high].tolist(), values[rows, high].tolist(), strict=True),
            strict=True,
        )
    ]
    for row in np.flatnonzero(gaps.any(1)).tolist():
        found[row][2] = int(steps[row, gaps[row].argmax()])
        if gaps[row].all():
            found[row][:2] = [None, None]
    return found


def _merged(
    a: Sequence[tuple[int, float] | int | None], b: Sequence[tuple[int, float] | int | None]
) -> list[tuple[int, float] | int | None]:
    lows = [one for one in (a[0], b[0]) if isinstance(one, tuple)]
    highs = [one for one in (a[1], b[1]) if isinstance(one, tuple)]
    # Among equal values, min and max take the first.
    return [
        min(lows, key=lambda one: one[1], default=None),
        max(highs, key=lambda one: one[1], default=None),
        a[2] if a[2] is not None else b[2],
    ]


@dataclass
class OlderMetric:
    """One metric of one split over the steps that are not kept.

    Attributes:
        logs: Number of steps that logged it.
        known: Number of these steps with a finite value.
        total: Sum of the finite values.
        largest: Largest finite value.
        weighed: Number of steps with a finite value and a positive weight.
        weighted: Sum of value times weight.
        weight: Sum of weights.
        begun: The first few logs with a finite value.
        last: Step and value of the last log.
        curve: The curve for plots.
        falls: For a metric in `FALLING`, the steps at which it fell, and its new value; of very many, an evenly spread part.
    """

    logs: int = 0
    known: int = 0
    total: float = 0.0
    largest: float = -math.inf
    weighed: int = 0
    weighted: float = 0.0
    weight: float = 0.0
    begun: list[tuple[int, float]] = field(default_factory=list)
    last: tuple[int, float | None] | None = None
    curve: Stretches = field(default_factory=Stretches)
    falls: list[tuple[int, float]] = field(default_factory=list)
    _fallen: int = 0
    _stride: int = 1

    def add(
        self, name: str, steps: NDArray[np.int64], values: NDArray[np.float64], weights: NDArray[np.float64] | None
    ) -> None:
        """Add logs in the order of their steps; NaN stands for a value that was not finite, or for a missing weight."""
        finite = ~np.isnan(values)
        known = values[finite]
        if name in FALLING:
            before = np.concatenate([[_value(self.last)], values[:-1]])
            fell = (values < before) & (values != 0)
            self._note_falls(list(zip(steps[fell].tolist(), values[fell].tolist(), strict=True)))
        self.logs += len(values)
        self.known += len(known)
        if len(known):
            self.total += float(known.sum())
            self.largest = max(self.largest, float(known.max()))
            room = slice(FIRST - len(self.begun))
            self.begun += zip(steps[finite][room].tolist(), known[room].tolist(), strict=True)
        if weights is not None:
            counted = finite & (weights > 0)
            self.weighed += int(counted.sum())
            self.weighted += float((values[counted] * weights[counted]).sum())
            self.weight += float(weights[counted].sum())
        self.last = int(steps[-1]), float(values[-1]) if finite[-1] else None
        self.curve.add(steps, values)

    def _note_falls(self, falls: list[tuple[int, float]]) -> None:
        for one in falls:
            if self._fallen % self._stride == 0:
                self.falls.append(one)
            self._fallen += 1
            if len(self.falls) > 2 * STRETCHES:
                self.falls = self.falls[::2]
                self._stride *= 2

    def points(self) -> list[tuple[int, float | None]]:
        """Return steps and values for a plot: the first ones, the extremes of every stretch, and the last one."""
        return sorted(dict([*self.begun, *self.curve.points(), *([self.last] if self.last else [])]).items())


def _value(last: tuple[int, float | None] | None) -> float:
    return math.nan if last is None or last[1] is None else last[1]


@dataclass
class OlderSteps:
    """The steps of one split that are not kept."""

    steps: int = 0
    nonfinite: int = 0
    last_step: int = -1
    metrics: dict[str, OlderMetric] = field(default_factory=dict)

    def add(self, steps: Sequence[int], metrics: Sequence[Mapping[str, float | None]]) -> None:
        """Add steps in ascending order, with the metrics that they logged."""
        self.steps += len(steps)
        self.last_step = max(self.last_step, steps[-1])
        columns = _columns(metrics)
        broken = np.zeros(len(steps), dtype=np.bool_)
        for name, (logged, values) in columns.items():
            if name.startswith(PREFIX):
                broken |= logged & np.isnan(values)
        self.nonfinite += int(broken.sum())
        for name, (logged, values) in columns.items():
            weights = None
            if name.startswith(PREFIX) and (weight := weight_of(name.removeprefix(PREFIX))) is not None:
                found = columns.get(weight)
                weights = np.full(len(steps), math.nan) if found is None else found[1]
                weights = weights[logged]
            at = np.asarray(steps, dtype=np.int64)[logged]
            self.metrics.setdefault(name, OlderMetric()).add(name, at, values[logged], weights)


def _columns(
    metrics: Sequence[Mapping[str, float | None]],
) -> dict[str, tuple[NDArray[np.bool_], NDArray[np.float64]]]:
    """Return for each metric, by name, which steps logged it, and its values; NaN where there is none."""
    names = list(metrics[0])
    if names and all(list(one) == names for one in metrics):  # nearly always
        table = np.array([list(one.values()) for one in metrics], dtype=np.float64)  # None becomes NaN
        logged = np.ones(len(metrics), dtype=np.bool_)
        return {name: (logged, table[:, at]) for at, name in enumerate(names)}
    return {
        name: (
            np.fromiter((name in one for one in metrics), dtype=np.bool_, count=len(metrics)),
            np.array([one.get(name) for one in metrics], dtype=np.float64),
        )
        for name in {name: None for one in metrics for name in one}
    }
