"""One pass over log-probabilities in torch: per-row sums in float64, and the token-level results, block by block.

A correction needs only sums, maxima and minima over rows, and values local to a token. Rows of similar length are taken together
in blocks that stay in the processor's cache, so the data are read once and no further `[B, T]` tensor is made.

Shapes: B rows, T tokens, R rows of a block, W its longest row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from mismatch_ext.errors import NonFiniteLogprobError, RecordError
from mismatch_ext.gap import SATURATION
from mismatch_ext.presets import ResolvedCorrection, Rule

# Log-ratios are clamped to this before weights and rules, as in verl: e^20 is 4.9e8, beyond any bound in use.
LOG_RATIO_BOUND = 20.0
# Tokens of a block: its float64 temporaries stay in a second-level cache.
BLOCK = 1 << 15


@dataclass
class RuleSums:
    """Per-row sums of a token-level rule's statistic, float64 `[B]`."""

    total: Tensor
    clamped: Tensor
    clamped_squares: Tensor
    maximum: Tensor
    minimum: Tensor
    high: Tensor
    low: Tensor
    dropped: Tensor


@dataclass
class Rows:
    """Per-row sums of d = log pi_old - log mu, float64 `[B]`; `c` is d clamped to `LOG_RATIO_BOUND`; `left`: tokens
    that the token-level rules keep; `weight_spread`: (w - 1)^2, from which a small variance can be had without cancelling."""

    count: Tensor
    old: Tensor
    d: Tensor
    k3: Tensor
    c: Tensor
    c_squares: Tensor
    ratio: Tensor
    ratio_squares: Tensor
    d_max: Tensor
    d_min: Tensor
    weight: Tensor
    weight_spread: Tensor
    weight_max: Tensor
    weight_min: Tensor
    high: Tensor
    low: Tensor
    left: Tensor
    rules: dict[str, RuleSums]

    @classmethod
    def zeros(cls, rows: int, rules: tuple[Rule, ...], device: torch.device) -> Rows:
        """Return sums of nothing."""

        def zero() -> Tensor:
            return torch.zeros(rows, dtype=torch.float64, device=device)

        sums = {rule.name: RuleSums(*(zero() for _ in range(8))) for rule in rules if rule.over == "token"}
        return cls(rules=sums, **{f.name: zero() for f in fields(cls) if f.name != "rules"})


def bounds_of(rule: Rule, settings: ResolvedCorrection) -> tuple[float, float]:
    """Return the interval in which a rule keeps its statistic; for k1 rules, the statistic is k1 = -log rho."""
    if rule.lower is None:
        return float("-inf"), rule.upper
    low, high = torch.tensor([rule.lower, rule.upper], dtype=torch.float64).log().tolist()
    return (low, high) if "verl_inverse_k1" in settings.compat else (-high, -low)


def token_statistic(log_ratio: Tensor, estimator: str) -> Tensor:
    """Return k1, k2 or k3 of clamped log-ratios, in float64."""
    if estimator == "k1":
        return -log_ratio
    return log_ratio.square().mul_(0.5) if estimator == "k2" else torch.expm1(log_ratio).sub_(log_ratio)


def bounded(weight: Tensor, settings: ResolvedCorrection) -> Tensor:
    """Apply the bounds to weights, in place where possible."""
    if settings.bound in ("truncate", "clip"):
        return weight.clamp_(min=settings.lower, max=settings.upper)
    outside = torch.zeros_like(weight, dtype=torch.bool)
    if settings.upper is not None:
        outside |= weight > settings.upper
    if settings.lower is not None:
        outside |= weight < settings.lower
    return weight.masked_fill_(outside, 0.0)


def low_mark(settings: ResolvedCorrection) -> float:
    """Return the ratio below which a ratio counts as low: the lower bound, or the inverse of the upper one."""
    if settings.lower is not None:
        return settings.lower
    return 1 / settings.upper if settings.upper else 0.0


def zeros(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return zeros of a tensor's shape; on a CPU, memory pages that are never written (padding) are never touched."""
    if like.device.type == "cpu":
        return torch.from_numpy(np.zeros(like.shape, dtype=np.float64 if dtype == torch.float64 else np.float32))
    return torch.zeros(like.shape, dtype=dtype, device=like.device)


def scan_blocks(
    rollout: Tensor, old: Tensor, mask: Tensor, settings: ResolvedCorrection, weights: Tensor | None, kept: Tensor
) -> Rows:
    """Do as `scan.scan`, in torch on any device; the caller has to find non-finite values in the sums."""
    rows = Rows.zeros(len(mask), settings.rules, mask.device)
    rows.count = mask.sum(1).double()
    rows.left = rows.count.clone()
    for index, width in _blocks(rows.count, mask):
        _scan_block(
            rollout[index, :width], old[index, :width], mask[index, :width], index, settings, rows, weights, kept
        )
    return rows


def _blocks(count: Tensor, mask: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Yield row indices and width of each block: rows of similar length are together, empty rows are left out."""
    order = count.argsort()
    first = int((count == 0).sum())
    lengths = count[order].long().tolist()
    while first < len(order):
        last = first + 1
        while last < len(order) and (last + 1 - first) * lengths[last] <= BLOCK:
            last += 1
        index = order[first:last]
        width = lengths[last - 1]
        if width < mask.shape[1] and bool(mask[index, width:].any()):  # a row with holes ends later than its count
            width = int(mask[index].any(0).nonzero()[-1]) + 1
        yield index, width
        first = last


def _scan_block(
    rollout: Tensor,
    old: Tensor,
    mask: Tensor,
    index: Tensor,
    settings: ResolvedCorrection,
    rows: Rows,
    weights: Tensor | None,
    kept: Tensor,
) -> None:
    width = mask.shape[1]
    full = bool(mask.all())
    empty = ~mask
    narrow = torch.sub(old, rollout) if old.dtype == rollout.dtype == torch.float32 else old.double() - rollout.double()
    rows.d_max[index] = (narrow if full else narrow.masked_fill(empty, float("-inf"))).amax(1).double()
    rows.d_min[index] = (narrow if full else narrow.masked_fill_(empty, float("inf"))).amin(1).double()
    d = narrow.double() if full else narrow.masked_fill_(empty, 0.0).double()
    rows.old[index] = (old if full else old.masked_fill(empty, 0.0)).sum(1, dtype=torch.float64)
    rows.d[index] = d_sum = d.sum(1)
    extreme = float(torch.maximum(rows.d_max[index], -rows.d_min[index]).max())
    if extreme <= LOG_RATIO_BOUND:
        excess = torch.expm1(d)
        excess_sum = excess.sum(1)
        rows.k3[index] = excess_sum - d_sum
        rows.c[index] = d_sum
    else:
        rows.k3[index] = torch.expm1(d.clamp(max=SATURATION)).sum(1) - d_sum
        d = d.clamp_(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        excess = torch.expm1(d)
        excess_sum = excess.sum(1)
        rows.c[index] = d.sum(1)
    count = rows.count[index]
    rows.ratio[index] = excess_sum + count
    rows.ratio_squares[index] = torch.linalg.vecdot(excess, excess) + 2 * excess_sum + count
    if any(rule.estimator == "k2" for rule in settings.rules):
        rows.c_squares[index] = torch.linalg.vecdot(d, d)
    for rule in settings.rules:
        if rule.over == "token":
            stat = token_statistic(d, rule.estimator)
            keep = _scan_rule(stat, mask, rows.rules[rule.name], index, bounds_of(rule, settings))
            kept[index, :width] &= keep
            rows.left[index] = kept[index, :width].sum(1).double()
    if weights is not None:
        _scan_weights(excess.add_(1.0), mask, empty, full, index, settings, rows, weights)


def _scan_weights(
    ratio: Tensor,
    mask: Tensor,
    empty: Tensor,
    full: bool,
    index: Tensor,
    settings: ResolvedCorrection,
    rows: Rows,
    weights: Tensor,
) -> None:
    """Bound the token-level weights of a block and sum them; `ratio` is overwritten."""
    high, low = settings.upper, low_mark(settings)
    ratio_max, ratio_min = (
        x.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp() for x in (rows.d_max[index], rows.d_min[index])
    )
    if high is not None and bool((ratio_max > high).any()):
        rows.high[index] = ((ratio > high) & mask).sum(1).double()
    if bool((ratio_min < low).any()):
        rows.low[index] = ((ratio < low) & mask).sum(1).double()
    weight = bounded(ratio, settings)
    if not full:
        weight.masked_fill_(empty, 0.0)
    rows.weight[index] = weight.sum(1)
    away = (weight - 1.0).masked_fill_(empty, 0.0)
    rows.weight_spread[index] = torch.linalg.vecdot(away, away)
    if settings.bound in ("truncate", "clip"):  # monotone: extreme ratios give extreme weights
        rows.weight_max[index] = bounded(ratio_max, settings)
        rows.weight_min[index] = bounded(ratio_min, settings)
    else:
        rows.weight_max[index] = weight.masked_fill(empty, float("-inf")).amax(1)
        rows.weight_min[index] = weight.masked_fill(empty, float("inf")).amin(1)
    weights[index, : weight.shape[1]] = weight.to(weights.dtype)


def _scan_rule(stat: Tensor, mask: Tensor, sums: RuleSums, index: Tensor, bounds: tuple[float, float]) -> Tensor:
    """Sum a token-level rule's statistic and return which tokens it keeps."""
    low, high = bounds
    above, below = (stat > high) & mask, (stat < low) & mask
    clamped = stat.clamp(min=max(low, 0.0) if low == float("-inf") else low, max=high).masked_fill_(~mask, 0.0)
    sums.total[index] = stat.masked_fill(~mask, 0.0).sum(1)
    sums.clamped[index] = clamped.sum(1)
    sums.clamped_squares[index] = clamped.square().sum(1)
    sums.maximum[index] = stat.masked_fill(~mask, float("-inf")).amax(1)
    sums.minimum[index] = stat.masked_fill(~mask, float("inf")).amin(1)
    sums.high[index], sums.low[index] = above.sum(1).double(), below.sum(1).double()
    sums.dropped[index] = (above | below).sum(1).double()
    return ~(above | below)


def offender(rollout: Tensor, old: Tensor, mask: Tensor) -> Exception:
    """Return the error that names the first value that is not finite, for rows whose sums are not finite."""
    return (
        not_finite("rollout_logprobs", rollout, mask)
        or not_finite("old_logprobs", old, mask)
        or RecordError("log-probabilities overflow float64 when summed; their unit must be nats.")
    )


def not_finite(name: str, tensor: Tensor, mask: Tensor) -> NonFiniteLogprobError | None:
    """Return an error that names the first unmasked value that is not finite, or None."""
    bad = (~torch.isfinite(tensor) & mask).nonzero()
    if not len(bad):
        return None
    row, position = (int(x) for x in bad[0])
    return NonFiniteLogprobError(
        f"{name}[{row}, {position}] is {float(tensor[row, position])} in an unmasked position; log-probabilities of sampled "
        "tokens are finite. Mask the token, or find out why it was not scored."
    )
