"""What is measured of a loop's batches over all the ranks that train together: each function here is called by all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mismatch_ext.host_names import HostNames
from mismatch_ext.lr import RateControl, gap_statistics, length_statistics
from mismatch_ext.ranks import Ranks
from mismatch_ext.run.batch import Batch
from mismatch_ext.verdicts import Verdicts

Gap = tuple[Tensor, Tensor, Tensor]
"""Old log-probabilities, rollout log-probabilities and mask `[B, T]`."""


def lead_by_gap(rate: RateControl, gap: Gap, ranks: Ranks) -> None:
    """Let the gap of a batch over all ranks lead the rate, so that all of them have one multiplier.

    Args:
        rate: Learning-rate control; another trigger collects nothing.
        gap: This rank's part. One that is not finite was refused before, or is a finding, and leads nothing.
        ranks: The processes that each hold a part.
    """
    if rate.config.trigger not in ("mismatch_kl", "f_tau"):
        return
    old, rollout, mask = gap
    if not bool((old.isfinite() & rollout.isfinite())[mask.bool()].all()):
        mask = torch.zeros_like(mask)  # the other ranks wait for this one's sum
    reduce = None if ranks.size == 1 else lambda values, reduction: ranks.sum(values)
    tokens, statistics = gap_statistics(old, rollout, mask, reduce=reduce)
    rate.collect(tokens, **statistics)


def lead_by_lengths(rate: RateControl | None, batch: Batch, ranks: Ranks, names: HostNames) -> dict[str, float]:
    """Let the lengths of a batch over all ranks lead the rate, if these are its trigger, and return what to log of them.

    Args:
        rate: Learning-rate control; None without.
        batch: This rank's part.
        ranks: The processes that each hold a part.
        names: What the metrics are called.
    """
    known = all(record.finish_reason is not None for record in batch.records)
    if ranks.size > 1:
        known = all(ranks.gather(known))
    cut = torch.tensor([record.finish_reason == "length" for record in batch.records]) if known else None
    found = length_statistics(batch.lengths, cut, reduce=lambda values, reduction: ranks.sum(values))
    if rate is not None and rate.config.trigger == "response_length":
        rate.collect(1.0, **found.to_dict())
    named = {names.length: found.response_length, "truncated_fraction": found.truncated_fraction}
    return {name: value for name, value in named.items() if value is not None}


def means_of_ranks(metrics: dict[str, float], names: Sequence[str], ranks: Ranks) -> dict[str, float]:
    """Return the means over ranks of those of the metrics that each rank has of its own part.

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
    """Bring what the other ranks have found under `observe` to the main process, which writes it."""
    if not verdicts.observes or ranks.size == 1:
        return
    mine = [] if ranks.rank == 0 else verdicts.take()
    for findings in ranks.gather(mine):
        if ranks.rank == 0:
            verdicts.add(findings, said=True)


def number(value: Any) -> float:
    """Return a number, or the mean of a tensor."""
    return float(value.detach().float().mean()) if isinstance(value, Tensor) else float(value)


def merged(name: str, values: Sequence[float]) -> float:
    """Return what is logged of a metric that was measured several times since the last log."""
    if name.endswith(("_max", "_min")):
        return max(values) if name.endswith("_max") else min(values)
    return sum(values) / len(values)
