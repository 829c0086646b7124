"""Profiles pooled over the steps of a run: the gap by position in the response and by token probability."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mismatch_ext.log_reading import RunData


@dataclass(frozen=True, kw_only=True)
class Pooled:
    """One profile: each bin's token count, mean |Δlogp| and largest |Δlogp| (nat); None in empty bins."""

    edges: tuple[float, ...]
    count: tuple[float, ...]
    mean: tuple[float | None, ...]
    largest: tuple[float | None, ...]

    @property
    def gap_share(self) -> tuple[float | None, ...]:
        """Each bin's share of the summed |Δlogp|."""
        sums = [n * (m or 0.0) for n, m in zip(self.count, self.mean, strict=True)]
        total = sum(sums)
        return tuple(s / total if total > 0 and n > 0 else None for s, n in zip(sums, self.count, strict=True))

    def share_below(self, edge: float) -> tuple[float, float]:
        """Return the shares of tokens and of the summed |Δlogp| in the bins that end at or below `edge`."""
        total = sum(self.count)
        below = [i for i in range(len(self.count)) if i + 1 < len(self.edges) and self.edges[i + 1] <= edge]
        gap = sum(self.gap_share[i] or 0.0 for i in below)
        return (sum(self.count[i] for i in below) / total if total else 0.0), gap

    def growth(self) -> float | None:
        """Mean |Δlogp| of the later half of the tokens, divided by that of the earlier half; halves are whole bins."""
        half, seen = sum(self.count) / 2, 0.0
        parts: tuple[list[int], list[int]] = ([], [])
        for index, count in enumerate(self.count):
            parts[int(seen + count / 2 > half)].append(index)
            seen += count
        means = []
        for part in parts:
            tokens = sum(self.count[i] for i in part)
            means.append(sum(self.count[i] * (self.mean[i] or 0.0) for i in part) / tokens if tokens else 0.0)
        return means[1] / means[0] if means[0] > 0 and math.isfinite(means[1] / means[0]) else None


def pool_profile(run: RunData, name: str, split: str) -> Pooled | None:
    """Pool the records of one profile over all steps of a split that share the first record's bins.

    Returns:
        The pooled profile, or None if the split has no profile or all its bins are empty.
    """
    records = [r.profiles[name] for r in run.profiles if r.split == split and name in r.profiles]
    records = [r for r in records if r["edges"] == records[0]["edges"] and len(r["count"]) == len(records[0]["count"])]
    if not records:
        return None
    bins = range(len(records[0]["count"]))
    count = [sum(r["count"][i] or 0.0 for r in records) for i in bins]
    total = [sum((r["count"][i] or 0.0) * (r["abs_diff_mean"][i] or 0.0) for r in records) for i in bins]
    if not sum(count) > 0 or not math.isfinite(sum(count)) or not math.isfinite(sum(total)):
        return None
    peaks = [[v for r in records if (v := r["abs_diff_max"][i]) is not None] for i in bins]
    return Pooled(
        edges=tuple(edge or 0.0 for edge in records[0]["edges"]),
        count=tuple(count),
        mean=tuple(t / n if n > 0 else None for t, n in zip(total, count, strict=True)),
        largest=tuple(max(peak) if peak else None for peak in peaks),
    )
