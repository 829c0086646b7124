"""The gap of responses whose prompt the engine took from its prefix cache, beside the gap of those that it computed afresh.

A prefix cache holds keys and values of the weights that computed them. If an update does not reset it, responses to cached
prompts are sampled from a mixture of old and new weights. A score of the same tokens as a prompt reads no cache, and is right.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mismatch_ext.gap import k3
from mismatch_ext.names import PARTS_OF_CACHE
from mismatch_ext.rollout import RolloutRecord
from mismatch_ext.sums import Sums

_CACHED, _ = PARTS_OF_CACHE
_NAMES = ("tokens", "abs", "k3")


def no_cache_sums() -> Sums:
    """Return the sums of no response."""
    return {f"{kind}{name}": torch.zeros((), dtype=torch.float64) for kind in PARTS_OF_CACHE for name in _NAMES}


def cache_sums(*, old: Tensor, rollout: Tensor, mask: Tensor, records: Sequence[RolloutRecord | None]) -> Sums:
    """Return sums of the gap of a batch, apart for cached and fresh prompts; responses of which that is unknown are left out.

    Args:
        old: The trainer's log-probabilities at sampling time `[B, T]`, nats.
        rollout: The engine's `[B, T]`.
        mask: Which tokens count `[B, T]`.
        records: The rollout of each row; None where it is unknown.
    """
    sums = no_cache_sums()
    counts = [None if record is None else record.cached_tokens for record in records]
    if all(count is None for count in counts):
        return sums
    sampled = mask.bool()
    gap = torch.where(sampled, old.double() - rollout.double(), 0.0).cpu()
    of_row = {"tokens": sampled.sum(1).cpu().double(), "abs": gap.abs().sum(1), "k3": k3(gap).sum(1)}
    for kind in PARTS_OF_CACHE:
        rows = torch.tensor([count is not None and (count > 0) == (kind == _CACHED) for count in counts])
        for name in _NAMES:
            sums[f"{kind}{name}"] = of_row[name][rows].sum()
    return sums


def cache_metrics(sums: Sums) -> dict[str, float]:
    """Return the mean gap per token of each kind that was met, without prefix."""
    metrics = {}
    for kind in PARTS_OF_CACHE:
        tokens = float(sums[f"{kind}tokens"])
        if tokens:
            metrics[f"{kind}tokens"] = tokens
            metrics[f"{kind}logp_abs_diff_mean"] = float(sums[f"{kind}abs"]) / tokens
            metrics[f"{kind}k3_kl"] = float(sums[f"{kind}k3"]) / tokens
    return metrics
