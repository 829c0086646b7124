"""Writes the gap as an exact sum of parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from mismatch_ext.doctor.sample import Floats, Integers
from mismatch_ext.metrics.numerics import k3

# With fewer tokens, intervals of shares are wider than half of the gap; k3, which few tokens carry, needs more tokens.
LEAST_TOKENS, LEAST_TOKENS_K3 = 2_000, 30_000
DRAWS = 400


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of the gap.

    Args:
        name: What causes it.
        mean: Mean absolute value of this part, in nats per token.
        share: Its share of the mean |Δlogp|; None for too few tokens.
        low, high: 90 % interval of the share, over responses.
        share_k3: Its share of k3; None for too few tokens.
    """

    name: str
    mean: float
    share: float | None
    low: float | None
    high: float | None
    share_k3: float | None


def split(parts: Mapping[str, Floats], row: Integers, rng: np.random.Generator) -> list[Part]:
    r"""Return what each part contributes to the gap d = engine - trainer, which is the sum of the parts.

    For a function f with f(0) = 0, the part p of d gets f(d) p / d of f(d); with f = |d| that is sign(d) p. The shares add up
    to 1. They are attributions along one path, and a share can be negative.

    Args:
        parts: Name and term of each token `[N]`; they add up to d.
        row: The response of each token `[N]`.
        rng: For the bootstrap.
    """
    gap = np.sum(list(parts.values()), axis=0)
    sizes = np.abs(gap)
    curve = k3(torch.from_numpy(-gap)).numpy()
    per_unit = np.divide(curve, gap, out=np.zeros_like(gap), where=gap != 0)
    count = int(row.max()) + 1
    draws = rng.integers(0, count, (DRAWS, count))
    totals = np.bincount(row, sizes, count)
    found = []
    for name, term in parts.items():
        terms = np.bincount(row, np.sign(gap) * term, count)
        # Show shares only if there are enough tokens to tell the parts apart.
        shown = len(gap) >= LEAST_TOKENS and totals.sum() > 0
        drawn = terms[draws].sum(1) / np.maximum(totals[draws].sum(1), 1e-300)
        low, high = np.quantile(drawn, [0.05, 0.95])
        found.append(
            Part(
                name=name,
                mean=float(np.abs(term).mean()),
                share=float(terms.sum() / totals.sum()) if shown else None,
                low=float(low) if shown else None,
                high=float(high) if shown else None,
                share_k3=float((per_unit * term).sum() / curve.sum())
                if len(gap) >= LEAST_TOKENS_K3 and curve.sum() > 0
                else None,
            )
        )
    return found
