"""The same pass as `rows.scan_blocks` on a CPU: row by row in numpy, so that each row is read into the first-level cache once.

Rows whose tokens are contiguous need no masked operation; a row with holes is compacted first. The pass uses one thread: for rows
of a few thousand tokens, a second thread gains less than passing the interpreter lock costs (measured).

Shapes: B rows, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mismatch_ext.correction.rows import LOG_RATIO_BOUND, Rows, RuleSums, bounds_of, low_mark
from mismatch_ext.gap import SATURATION
from mismatch_ext.presets import ResolvedCorrection

Array = np.ndarray[Any, Any]
# Beyond this ratio, a row is summed again after bounding; otherwise its sums are corrected for the few tokens beyond the bounds.
DOMINANT = 1e3


def scan_cpu(
    rollout: Tensor, old: Tensor, mask: Tensor, settings: ResolvedCorrection, weights: Tensor | None, kept: Tensor
) -> Rows:
    """Do as `scan.scan`, for tensors on the CPU; the caller has to find non-finite values in the sums."""
    rows = Rows.zeros(len(mask), settings.rules, mask.device)
    flags: Array = mask.numpy()
    counts = [int(np.count_nonzero(row)) for row in flags]  # along an axis, numpy would sum integers, which is slower
    rows.count.numpy()[:] = rows.left.numpy()[:] = counts
    scanner = _Scanner(
        rollout=_plain(rollout),
        old=_plain(old),
        flags=flags,
        settings=settings,
        weights=None if weights is None else weights.numpy(),
        kept=kept.numpy(),
        rows=rows,
    )
    scanner.scan([row for row, count in enumerate(counts) if count], counts)
    return rows


def _plain(tensor: Tensor) -> Array:
    tensor = tensor.detach()
    return (tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()).numpy()


class _Scanner:
    """Holds the arrays of a pass."""

    def __init__(
        self,
        *,
        rollout: Array,
        old: Array,
        flags: Array,
        settings: ResolvedCorrection,
        weights: Array | None,
        kept: Array,
        rows: Rows,
    ) -> None:
        self.rollout, self.old, self.flags, self.settings = rollout, old, flags, settings
        self.weights, self.kept = weights, kept
        self.out = {name: value.numpy() for name, value in vars(rows).items() if name != "rules"}
        self.rules: list[tuple[str, tuple[float, float], RuleSums]] = [
            (rule.estimator, bounds_of(rule, settings), rows.rules[rule.name])
            for rule in settings.rules
            if rule.over == "token"
        ]
        self.squares = any(rule.estimator == "k2" for rule in settings.rules)
        self.high = settings.upper if settings.upper is not None else math.inf
        self.low = low_mark(settings)

    def scan(self, order: list[int], lengths: list[int]) -> None:
        """Take the given rows."""
        width = self.flags.shape[1]
        difference, excess = np.empty(width), np.empty(width)
        narrow = np.empty(width, dtype=np.result_type(self.old, self.rollout))
        out = self.out
        with np.errstate(invalid="ignore", over="ignore"):
            for row in order:
                count = lengths[row]
                flags = self.flags[row]
                whole = bool(np.logical_and.reduce(flags[:count]))
                old, rollout = self.old[row], self.rollout[row]
                old, rollout = (old[:count], rollout[:count]) if whole else (old[flags], rollout[flags])
                d, x, own = difference[:count], excess[:count], narrow[:count]
                np.subtract(old, rollout, out=own)
                high, low = float(np.maximum.reduce(own)), float(np.minimum.reduce(own))
                np.copyto(d, own)
                total = np.add.reduce(d)
                out["d_max"][row], out["d_min"][row], out["d"][row] = high, low, total
                out["old"][row] = np.add.reduce(old)  # pairwise, in its own dtype
                if high > LOG_RATIO_BOUND or low < -LOG_RATIO_BOUND:
                    out["k3"][row] = np.add.reduce(np.expm1(np.minimum(d, SATURATION))) - total
                    np.clip(d, -LOG_RATIO_BOUND, LOG_RATIO_BOUND, out=d)
                    np.expm1(d, out=x)
                    raised = np.add.reduce(x)
                    out["c"][row] = np.add.reduce(d)
                else:
                    np.expm1(d, out=x)
                    raised = np.add.reduce(x)
                    out["k3"][row], out["c"][row] = raised - total, total
                out["ratio"][row] = raised + count
                spread = np.dot(x, x)
                out["ratio_squares"][row] = spread + 2 * raised + count
                if self.squares:
                    out["c_squares"][row] = np.dot(d, d)
                place = slice(0, count) if whole else flags
                for estimator, bounds, sums in self.rules:
                    self._rule(row, place, d, x, estimator, bounds, sums)
                if self.rules:
                    out["left"][row] = np.count_nonzero(self.kept[row])
                if self.weights is not None:
                    self._weigh(row, place, x, (float(raised), float(spread)), high, low)

    def _weigh(self, row: int, place: Any, x: Array, sums: tuple[float, float], high: float, low: float) -> None:
        """Bound the weights 1 + x of a row, sum and store them; `sums` are those of x and of its square."""
        assert self.weights is not None
        out, settings, count = self.out, self.settings, len(x)
        largest = math.exp(min(max(high, -LOG_RATIO_BOUND), LOG_RATIO_BOUND)) if high == high else math.nan
        smallest = math.exp(min(max(low, -LOG_RATIO_BOUND), LOG_RATIO_BOUND)) if low == low else math.nan
        above, below = largest > self.high, smallest < self.low
        if above:
            out["high"][row] = np.count_nonzero(x > self.high - 1)
        if below:
            out["low"][row] = np.count_nonzero(x < self.low - 1)
        lower = settings.lower if settings.lower is not None else -math.inf
        weight, spread = sums[0] + count, sums[1]
        monotone = settings.bound in ("truncate", "clip")
        outside: Array | None = None
        if above or smallest < lower:
            outside = np.flatnonzero((x > self.high - 1) | (x < lower - 1) if smallest < lower else x > self.high - 1)
            before = x[outside]
            after = np.minimum(np.maximum(before, lower - 1), self.high - 1) if monotone else np.full_like(before, -1.0)
            x[outside] = after
            weight += np.add.reduce(after - before)
            spread += np.dot(after, after) - np.dot(before, before)
            if largest > DOMINANT:  # subtracting so large a ratio would lose the digits of the rest
                weight, spread = np.add.reduce(x) + count, np.dot(x, x)
        np.add(x, 1.0, out=x)
        out["weight"][row], out["weight_spread"][row] = weight, spread
        if monotone or outside is None:
            out["weight_max"][row] = min(max(largest, lower), self.high)
            out["weight_min"][row] = min(max(smallest, lower), self.high)
        else:
            out["weight_max"][row], out["weight_min"][row] = np.maximum.reduce(x), np.minimum.reduce(x)
        self.weights[row][place] = x

    def _rule(
        self, row: int, place: Any, d: Array, x: Array, estimator: str, bounds: tuple[float, float], sums: RuleSums
    ) -> None:
        """Sum a token-level rule's statistic in a row, and drop what it rejects."""
        forms: dict[str, Callable[[], Array]] = {"k1": lambda: -d, "k2": lambda: d * d / 2, "k3": lambda: x - d}
        stat = forms[estimator]()
        low, high = bounds
        above, below = stat > high, stat < low
        clamped = np.clip(stat, 0.0 if low == -math.inf else low, high)
        sums.total[row], sums.clamped[row] = float(stat.sum()), float(clamped.sum())
        sums.clamped_squares[row] = float(np.dot(clamped, clamped))
        sums.maximum[row], sums.minimum[row] = float(stat.max()), float(stat.min())
        sums.high[row], sums.low[row] = int(above.sum()), int(below.sum())
        outside = above | below
        sums.dropped[row] = int(outside.sum())
        kept = self.kept[row]
        kept[place] = kept[place] & ~outside
