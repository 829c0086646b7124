"""The correlation of the two sides' probabilities, from moments that add up over batches and ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Moments:
    """Moments of the probabilities p = e^old and q = e^rollout; centred, because raw sums cancel if all p and q are near 1.

    Args:
        n: How many tokens.
        mean_p, mean_q: Means.
        pp, qq, pq: Sums over tokens of the products of the deviations from these means.
    """

    n: float = 0.0
    mean_p: float = 0.0
    mean_q: float = 0.0
    pp: float = 0.0
    qq: float = 0.0
    pq: float = 0.0

    @classmethod
    def of(cls, p: Tensor, q: Tensor) -> Moments:
        """Return the moments of one batch of probabilities `[n]`, float64."""
        mean_p, mean_q = p.mean(), q.mean()
        p, q = p - mean_p, q - mean_q
        return cls(float(len(p)), *torch.stack([mean_p, mean_q, p @ p, q @ q, p @ q]).tolist())

    def __add__(self, other: Moments) -> Moments:
        """Return the moments of both together (Chan, Golub and LeVeque 1983)."""
        total = self.n + other.n
        if not total:
            return self
        delta_p, delta_q = other.mean_p - self.mean_p, other.mean_q - self.mean_q
        weight = self.n * other.n / total
        return Moments(
            n=total,
            mean_p=self.mean_p + delta_p * other.n / total,
            mean_q=self.mean_q + delta_q * other.n / total,
            pp=self.pp + other.pp + delta_p * delta_p * weight,
            qq=self.qq + other.qq + delta_q * delta_q * weight,
            pq=self.pq + other.pq + delta_p * delta_q * weight,
        )

    @property
    def pearson(self) -> float:
        """The correlation; 1 where either side is constant up to the rounding of its mean."""
        constant = 1e-28 * self.n
        if self.pp <= constant or self.qq <= constant:
            return 1.0
        return max(-1.0, min(1.0, self.pq / math.sqrt(self.pp) / math.sqrt(self.qq)))
