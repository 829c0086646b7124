"""Rollouts of older weights: how much of the gap is drift and not numerics, and what a clip makes of it.

v is the version of the weights that sampled a token, w the version that scores it:

    rollout(v) - train(w)  =  rollout(v) - train(v)  +  train(v) - train(w)
    the gap                   numerics                   drift

Tokens of one version, v = w, have no drift: their gap is exactly the numerics. If a batch has no such token, numerics is unknown,
which is not 0. The staleness of tokens does not tell how large the parts are:
regressing the gap on it gave intercepts whose error was several times the numerics.

A version has two forms: that of each token `[B, T]`, int64, or the segments of a response, pairs (version, first token) in order
of time. If a weight update interrupts an engine, the engine computes its cache again and goes on with the new weights, so that
each token has exactly one version. Shapes: B responses, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mismatch_ext.errors import RecordError
from mismatch_ext.gap import PROFILES, gap_metrics, gap_sums
from mismatch_ext.sums import Sums, part, prefixed

UNKNOWN = -1
"""Version of a token if nobody says which weights sampled it."""


def token_versions(segments: Sequence[Sequence[tuple[int | None, int]]], mask: Tensor) -> Tensor:
    """Return the version of the weights that sampled each token `[B, T]`, int64; `UNKNOWN` where nobody says, or none did.

    Segments are (version or None, index of the first token) in order. One that begins inside an earlier one replaces the tokens
    there, as when a chat template removes generated tokens before the next turn. Raises RecordError.
    """
    if mask.dim() != 2 or len(segments) != len(mask):
        raise RecordError(
            f"{len(segments)} lists of segments do not fit a mask of shape {tuple(mask.shape)}; give one list for each response."
        )
    versions = torch.full(mask.shape, UNKNOWN, dtype=torch.int64)
    for row, of_response in enumerate(segments):
        for version, start in of_response:
            if start < 0 or (version is not None and version < 0):
                raise RecordError(f"segment of version {version!r} from token {start}: both must be >= 0.")
            versions[row, start:] = UNKNOWN if version is None else version
    return versions.to(mask.device).masked_fill(~mask.bool(), UNKNOWN)


def of_one_version(versions: Tensor, mask: Tensor) -> Tensor:
    """Return True at the tokens up to which one version sampled the whole response `[B, T]`, bool.

    After a change of version the engine computes its cache again, with other experts for the earlier tokens. A trainer that
    replays the recorded experts then cannot score the later tokens as the engine did, whatever weights it has.
    """
    sampled = mask.bool()
    first = versions.gather(1, sampled.long().argmax(1, keepdim=True))
    return (sampled & (versions != first)).cumsum(1) == 0


def drift_sums(
    *,
    old: Tensor,
    rollout: Tensor,
    mask: Tensor,
    versions: Tensor,
    scoring: int,
    comparable: Tensor | None = None,
    means: Tensor | None = None,
) -> Sums:
    """Sum up the gap of rollouts that older weights may have sampled, separately for its parts.

    Args:
        old: The trainer's log-probabilities at version `scoring` `[B, T]`, nats.
        rollout: The engine's log-probabilities, each at the version that sampled the token `[B, T]`, nats.
        mask: True, or 1, at tokens that count `[B, T]`.
        versions: Version that sampled each token, or `UNKNOWN` `[B, T]`, int64.
        scoring: Version of the trainer's weights.
        comparable: True at tokens whose gap is numerics only, if their version is `scoring` `[B, T]`; for replayed routes
            `of_one_version` returns it. None means every token.
        means: That of `gap_sums`.

    Returns:
        Sums with the same names for every batch; see `mismatch_ext.sums`.

    Raises:
        RecordError: A token's version is one that the trainer has not reached yet, or shapes differ.
    """
    mask = mask.bool()
    same = mask & (versions == scoring)
    staleness = (scoring - versions)[mask & (versions != UNKNOWN)]
    if bool((staleness < 0).any()):
        raise RecordError(
            f"a token was sampled by weights of version {scoring - int(staleness.min())}, and the batch is scored by those of "
            f"version {scoring}: the versions of engine and trainer do not count the same."
        )
    numerics = same if comparable is None else same & comparable
    masks = {"stale": mask & ~same, "numerics": numerics}
    counts: dict[str, Any] = {
        "tokens": mask.sum(),
        "known": len(staleness),
        "staleness": staleness.sum(),
        "mixed": (same & ~numerics).sum(),
        "max:staleness": staleness.max() if len(staleness) else 0,
    }
    sums = {name: torch.tensor(float(value), dtype=torch.float64) for name, value in counts.items()}
    for name, chosen in masks.items():
        gap = gap_sums(old=old, rollout=rollout, mask=chosen, means=means)
        # Without profiles, which are most of the bytes and nobody draws.
        sums |= prefixed(name, {key: value for key, value in gap.items() if key.partition("/")[0] not in PROFILES})
    return sums


def drift_metrics(sums: Sums, *, support_truncated: bool = False) -> dict[str, float]:
    """Return the metrics of stale rollouts by name; docs/metrics.md has the formula and unit of each.

    With rollouts of version v and a trainer of version w, rollout(v) - train(w) is numerics, rollout(v) - train(v), and drift,
    train(v) - train(w). Only tokens of the present version speak of numerics.

    Args:
        sums: Sums from `drift_sums`, or several of them merged.
        support_truncated: As in `gap_metrics`.

    Returns:
        Metrics without prefix; values that are unknown are left out.
    """
    tokens, known = float(sums["tokens"]), float(sums["known"])
    metrics = {"staleness_mean": float(sums["staleness"]) / known} if known else {}
    metrics["staleness_max"] = float(sums["max:staleness"])
    if tokens:
        mixed = float(sums["mixed"])
        metrics["same_version_frac"] = (float(sums["numerics/tokens"]) + mixed) / tokens
        metrics["mixed_routes_frac"] = mixed / tokens
        metrics["unknown_version_frac"] = (tokens - known) / tokens
    metrics["numerics/tokens"] = float(sums["numerics/tokens"])
    for name in ("stale", "numerics"):
        gap = gap_metrics(part(sums, name), support_truncated=support_truncated)
        metrics |= {f"{name}/{key}": value for key, value in gap.items()}
    return metrics


# Phantom clipping. A PPO clip is meant to limit the change of the policy. If the old log-probabilities are the engine's (`bypass`
# modes), the ratio contains the mismatch too: at the weights that sampled, it alone causes every clipped token.


def stopped_by_clip(log_ratio: Tensor, advantages: Tensor, low: float = 0.2, high: float = 0.2) -> Tensor:
    """Tell which tokens have no gradient under PPO's clip (arXiv 1707.06347), from log r, nats, and advantages that broadcast.

    min(r A, clip(r, 1 - low, 1 + high) A) is constant in r where r > 1 + high and A > 0, and where r < 1 - low and A < 0.
    """
    least = math.log1p(-low) if low < 1 else -math.inf  # r is never below 0
    rising, falling = log_ratio > math.log1p(high), log_ratio < least
    return (rising & (advantages > 0)) | (falling & (advantages < 0))


@torch.no_grad()
def clip_sums(
    *,
    trainer: Tensor,
    engine: Tensor,
    advantages: Tensor,
    mask: Tensor,
    low: float = 0.2,
    high: float = 0.2,
    sequences: bool = False,
) -> Sums:
    """Count what a clip on pi_trainer / pi_engine `[B, T]`, or on a response's mean (GSPO), stops at an equal policy."""
    chosen = mask.bool()
    wide = advantages if advantages.dim() == trainer.dim() else advantages[:, None]
    all_d = torch.where(chosen, trainer.double() - engine.double(), 0.0)
    clipped = all_d
    if sequences:
        clipped = (all_d.sum(-1, keepdim=True) / chosen.sum(-1, keepdim=True).clamp(min=1)).expand(all_d.shape)
    d, a = all_d[chosen], wide.expand(trainer.shape)[chosen]
    up, down = a > 0, a < 0
    counts = {
        "tokens": torch.ones_like(d),
        "stopped": stopped_by_clip(clipped[chosen], a, low, high),
        "up": up,
        "up_gap": d[up],
        "down": down,
        "down_gap": d[down],
    }
    values = torch.stack([value.sum().double() for value in counts.values()]).cpu()
    return dict(zip(counts, values, strict=True))


def clip_metrics(sums: Sums) -> dict[str, float]:
    """Return the share of tokens that the clip stops, and the gap of reinforced tokens minus that of discouraged ones."""
    s = {name: float(value) for name, value in sums.items()}
    up, down = (s[f"{side}_gap"] / s[side] if s[side] else math.nan for side in ("up", "down"))
    return {"phantom_clip_frac": s["stopped"] / s["tokens"] if s["tokens"] else math.nan, "advantage_gap": up - down}
