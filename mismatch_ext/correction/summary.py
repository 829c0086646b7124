"""Metrics of a correction, from per-row sums, with the names and definitions of verl's rollout_corr_helper.

Means over sequences leave out rows without tokens, unless `compat` has `verl_empty_rows`. Exponentials saturate at e^600.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mismatch_ext.correction.rows import LOG_RATIO_BOUND, Rows, low_mark
from mismatch_ext.gap import SATURATION
from mismatch_ext.presets import ResolvedCorrection, Rule


def _filled(rows: Rows, settings: ResolvedCorrection) -> Tensor:
    return torch.ones_like(rows.count, dtype=torch.bool) if "verl_empty_rows" in settings.compat else rows.count > 0


def _std(values: Tensor) -> float:
    return float(values.std()) if len(values) > 1 else 0.0


def summarise(rows: Rows, settings: ResolvedCorrection) -> dict[str, float]:
    """Return the gap between the two policies: perplexities, KL and chi-squared."""
    filled, tokens = _filled(rows, settings), float(rows.count.sum())
    length = rows.count.clamp(min=1)
    trained = (rows.old / length)[filled]
    rolled = ((rows.old - rows.d) / length)[filled]
    difference = rolled - trained
    sequence = rows.d[filled].clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return {
        "training_ppl": float((-trained).clamp(max=SATURATION).exp().mean()),
        "training_log_ppl": float(-trained.mean()),
        "kl": -float(rows.d.sum()) / tokens,
        "k3_kl": float(rows.k3.sum()) / tokens,
        "rollout_ppl": float((-rolled).clamp(max=SATURATION).exp().mean()),
        "rollout_log_ppl": float(-rolled.mean()),
        "log_ppl_diff": float(difference.mean()),
        "log_ppl_abs_diff": float(difference.abs().mean()),
        "log_ppl_diff_max": float(difference.max()),
        "log_ppl_diff_min": float(difference.min()),
        "ppl_ratio": float(difference.clamp(max=SATURATION).exp().mean()),
        "chi2_token": float(rows.ratio_squares.sum()) / tokens - 1.0,
        "chi2_seq": float((2 * sequence).exp().mean()) - 1.0,
    }


def weight_metrics(rows: Rows, settings: ResolvedCorrection) -> dict[str, float]:
    """Return the statistics of the weights, before normalisation."""
    filled, tokens = _filled(rows, settings), float(rows.count.sum())
    upper = settings.upper if settings.upper is not None else float("inf")
    lower = low_mark(settings)
    length = rows.count.clamp(min=1)
    mean, away = float(rows.weight.sum()) / tokens, float((rows.weight - rows.count).sum()) / tokens
    variance = max(float(rows.weight_spread.sum()) / tokens - away * away, 0.0)
    squares = variance + mean * mean
    by_row = (rows.weight / length)[filled]
    metrics = {"rollout_is_mean": mean}
    if settings.level == "token":
        has = rows.count > 0
        raw_by_row = (rows.ratio / length)[filled]
        high, low = float(rows.high.sum()) / tokens, float(rows.low.sum()) / tokens
        largest, smallest = float(rows.weight_max[has].max()), float(rows.weight_min[has].min())
        outside = high + low
    else:
        log_weight = (rows.d if settings.level == "sequence" else rows.d / length)[filled]
        raw = log_weight.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
        raw_by_row = torch.where(rows.count[filled] > 0, raw, 0.0)
        high, low = float((raw > upper).double().mean()), float((raw < lower).double().mean())
        ends = torch.stack([log_weight.max(), log_weight.min()]).clamp(max=LOG_RATIO_BOUND).exp()
        largest, smallest = ends.tolist()
        beyond = ((raw > upper) | (raw < lower)).double() * rows.count[filled]
        outside = float(beyond.sum()) / tokens
    metrics |= {
        "rollout_is_ratio_fraction_high": high,
        "rollout_is_ratio_fraction_low": low,
        "rollout_is_max": largest,
        "rollout_is_min": smallest,
        "rollout_is_std": variance**0.5 if tokens > 1 else 0.0,
        "rollout_is_eff_sample_size": mean * mean / squares if squares > 0 else 0.0,
        "rollout_is_seq_mean": float(by_row.mean()),
        "rollout_is_seq_std": _std(by_row),
        "rollout_is_seq_max": float(by_row.max()),
        "rollout_is_seq_min": float(by_row.min()),
        "rollout_is_seq_max_deviation": float((by_row - 1).abs().max()),
        "rollout_is_seq_fraction_high": float((raw_by_row > upper).double().mean()),
        "rollout_is_seq_fraction_low": float((raw_by_row < lower).double().mean()),
    }
    if settings.bound in ("mask", "icepop") and settings.lower is not None and settings.upper is not None:
        metrics["rollout_is_oob_ratio"] = outside
    return metrics


def rule_metrics(
    rows: Rows, rule: Rule, stat: Tensor | None, bounds: tuple[float, float], settings: ResolvedCorrection
) -> dict[str, float]:
    """Return the statistics of one rejection rule.

    Args:
        rows: Per-row sums.
        rule: The rule.
        stat: Its statistic per row `[B]`, or None for a token-level rule.
        bounds: Interval of the statistic that is kept.
        settings: The correction.
    """
    low, high = bounds
    two_sided = rule.lower is not None
    has = rows.count > 0
    tokens, sequences = float(rows.count.sum()), float(has.sum())
    if stat is None:
        sums = rows.rules[rule.name]
        by_row = (sums.total / rows.count.clamp(min=1))[has]
        mean = float(sums.total.sum()) / tokens
        largest, smallest = float(sums.maximum[has].max()), float(sums.minimum[has].min())
        above, below = float(sums.high.sum()) / tokens, float(sums.low.sum()) / tokens
        clamped = float(sums.clamped.sum()) / tokens
        variance = max(float(sums.clamped_squares.sum()) / tokens - clamped * clamped, 0.0)
        dropped, dropped_rows = float(sums.dropped.sum()) / tokens, float((sums.dropped > 0).sum()) / sequences
    else:
        by_row, share = stat[has], rows.count[has] / tokens
        mean = float((by_row * share).sum())
        largest, smallest = float(by_row.max()), float(by_row.min())
        above, below = float((by_row > high).double().mean()), float((by_row < low).double().mean())
        inside = by_row.clamp(min=low if two_sided else 0.0, max=high)
        variance = float(((inside - (inside * share).sum()).square() * share).sum())
        beyond = (by_row > high) | (by_row < low)
        dropped, dropped_rows = float((beyond.double() * share).sum()), float(beyond.double().mean())
    values = {
        "mean": mean,
        "max": largest,
        "min": smallest,
        "fraction_high": above,
        "fraction_low": below,
        "std": variance**0.5 if tokens > 1 else 0.0,
        "seq_mean": float(by_row.mean()),
        "seq_std": _std(by_row),
        "seq_max": float(by_row.max()),
        "seq_min": float(by_row.min()),
        "seq_max_deviation": float(by_row.abs().max()),
        "seq_fraction_high": float((by_row > high).double().mean()),
        **({"seq_fraction_low": float((by_row < low).double().mean())} if two_sided else {}),
        "masked_fraction": dropped,
        "seq_masked_fraction": dropped_rows,
    }
    return {f"rollout_rs_{rule.name}_{name}": value for name, value in values.items()}
