"""The gap by position in the response, and by probability of the token."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

POSITION_EDGES: tuple[float, ...] = (0.0, *(float(2**k) for k in range(18)))
PROBABILITY_EDGES: tuple[float, ...] = (0, 1e-6, 1e-4, 1e-3, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 0.999, 1)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Measures per bin; bin i covers edges[i] <= x < edges[i + 1], and the last bin includes its upper edge too.

    Args:
        edges: Bin edges, one more than there are bins.
        count: Tokens per bin.
        abs_diff_mean: Mean |d| per bin; None for an empty bin.
        abs_diff_max: Largest |d| per bin; None for an empty bin.
        k3_mean: Mean k3 per bin; None for an empty bin.
    """

    edges: tuple[float, ...]
    count: tuple[int, ...]
    abs_diff_mean: tuple[float | None, ...]
    abs_diff_max: tuple[float | None, ...]
    k3_mean: tuple[float | None, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON-able data."""
        return {key: list(value) for key, value in asdict(self).items()}


class Histogram:
    """Running sums per bin."""

    def __init__(self, edges: tuple[float, ...]) -> None:
        self.edges = edges
        bins = len(edges) - 1
        self.count, self.abs_sum, self.abs_max, self.k3_sum = (torch.zeros(bins, dtype=torch.float64) for _ in range(4))

    def update(self, x: Tensor, abs_diff: Tensor, k3: Tensor) -> None:
        """Add n tokens, each with its position or probability x `[n]`."""
        # This runs on the CPU, because on an accelerator deterministic algorithms refuse weighted bincount.
        x, abs_diff, k3 = x.cpu(), abs_diff.cpu(), k3.cpu()
        inner = torch.tensor(self.edges[1:-1], dtype=torch.float64)
        bins = torch.bucketize(x, inner, right=True)
        size = len(self.edges) - 1
        self.count += torch.bincount(bins, minlength=size).double()
        self.abs_sum += torch.bincount(bins, weights=abs_diff, minlength=size)
        self.k3_sum += torch.bincount(bins, weights=k3, minlength=size)
        largest = torch.zeros(size, dtype=torch.float64).scatter_reduce_(0, bins, abs_diff, "amax")
        self.abs_max = torch.maximum(self.abs_max, largest)

    def merge(self, other: Histogram) -> None:
        """Add another histogram's sums."""
        self.count += other.count
        self.abs_sum += other.abs_sum
        self.k3_sum += other.k3_sum
        self.abs_max = torch.maximum(self.abs_max, other.abs_max)

    def state_dict(self) -> dict[str, list[float]]:
        """Return JSON-able sums."""
        return {name: getattr(self, name).tolist() for name in ("count", "abs_sum", "abs_max", "k3_sum")}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        """Restore sums."""
        for name, values in state.items():
            setattr(self, name, torch.tensor(values, dtype=torch.float64))

    def profile(self) -> Profile:
        """Return means and maxima per bin."""
        full = (self.count > 0).tolist()

        def or_none(values: Tensor) -> tuple[float | None, ...]:
            return tuple(value if some else None for value, some in zip(values.tolist(), full, strict=True))

        return Profile(
            edges=tuple(map(float, self.edges)),
            count=tuple(int(c) for c in self.count.tolist()),
            abs_diff_mean=or_none(self.abs_sum / self.count),
            abs_diff_max=or_none(self.abs_max),
            k3_mean=or_none(self.k3_sum / self.count),
        )
