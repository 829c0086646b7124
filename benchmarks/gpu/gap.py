"""Figures of a gap: means with intervals, tails, and means by the probability of a token.

Shapes: B responses, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from examples.bootstrap import bootstrap_ratio
from mismatch_ext.gap import k3

TAILS = (1.05, 1.1, 1.25, 1.5, 2.0, 4.0)
# Bounds of log-probability, from certain to rare.
BINS = (0.0, -0.1, -1.0, -3.0, -5.0, -7.0, -9.0, -float("inf"))
POINTS = 1200


def gap(engine: Tensor, trainer: Tensor, mask: Tensor) -> dict[str, Any]:
    """Return the measures of a gap.

    Args:
        engine: Log-probabilities of sampled tokens `[B, T]`, float64.
        trainer: Of the same tokens.
        mask: True at tokens that count `[B, T]`.

    Returns:
        Means of |d| and of k3 with 95 % intervals over responses, the root mean square, the share of ratios outside of
        [0.8, 1.25], and F(tau), the share of tokens whose probabilities differ by more than a factor tau.
    """
    d = torch.where(mask, trainer - engine, 0.0)
    kept, tokens = d[mask], mask.sum(1).double().numpy()
    return {
        "mean |d|": interval(d.abs().sum(1), tokens),
        "k3": interval((k3(d) * mask).sum(1), tokens),
        "root mean square": float(kept.square().mean().sqrt()),
        "outside of 0.8 to 1.25": float(((kept.exp() < 0.8) | (kept.exp() > 1.25)).double().mean()),
        "F": {f"{tau:g}": float((kept.abs() > torch.tensor(tau).log()).double().mean()) for tau in TAILS},
        "tokens": int(mask.sum()),
    }


def interval(sums: Tensor, tokens: Any) -> dict[str, Any]:
    """Return a mean per token with its interval, as an evidence file has it."""
    found = bootstrap_ratio(sums.numpy(), tokens).to_dict()
    return {key: found[key] for key in ("value", "low", "high")}


def by_probability(engine: Tensor, trainer: Tensor, mask: Tensor) -> dict[str, list[float]]:
    """Return the mean |d| of tokens by what the engine gave them; bins without tokens are left out.

    Returns:
        `log p`, the bins' mean log-probabilities, `mean |d|`, and `tokens`.
    """
    d, p = (trainer - engine)[mask].abs(), engine[mask]
    found: dict[str, list[float]] = {"log p": [], "mean |d|": [], "tokens": []}
    for high, low in zip(BINS, BINS[1:], strict=False):
        here = (p <= high) & (p > low)
        if bool(here.any()):
            for name, value in (("log p", p[here].mean()), ("mean |d|", d[here].mean()), ("tokens", here.sum())):
                found[name].append(float(value))
    return found


def scatter(engine: Tensor, trainer: Tensor, mask: Tensor) -> dict[str, list[float]]:
    """Return probabilities of at most `POINTS` tokens, evenly taken, on both sides."""
    kept: Sequence[Tensor] = (engine[mask].exp(), trainer[mask].exp())
    step = max(1, len(kept[0]) // POINTS)
    x, y = ([float(f"{value:.4g}") for value in side[::step].tolist()] for side in kept)
    return {"engine": x, "trainer": y}
