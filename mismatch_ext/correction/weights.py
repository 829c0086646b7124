"""Importance weights and rejection masks for the gap between rollout policy mu and trainer policy pi.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mismatch_ext.correction.rows import LOG_RATIO_BOUND, Rows, bounded, bounds_of, not_finite, zeros
from mismatch_ext.correction.scan import scan
from mismatch_ext.correction.summary import rule_metrics, summarise, weight_metrics
from mismatch_ext.errors import RecordError
from mismatch_ext.gap import as_bool, output_dtype
from mismatch_ext.presets import ResolvedCorrection, Rule, resolve

if TYPE_CHECKING:
    from mismatch_ext.config import CorrectionConfig


@dataclass(frozen=True, kw_only=True, eq=False)
class Correction:
    """The outcome of a correction.

    Args:
        weights: Importance weights `[B, T]`, float64 if an input is, otherwise float32, detached; 0 where there is no token. 1 at
            every token for level `none`.
        mask: True at tokens that are kept `[B, T]`.
        metrics: Scalars under verl's names, without prefix.
    """

    weights: Tensor
    mask: Tensor
    metrics: dict[str, float]

    def as_multiplier(self) -> Tensor:
        """Return the weights `[B, T]`, 0 at rejected tokens, for a host that multiplies its per-token loss by them."""
        return self.weights.masked_fill(~self.mask, 0.0)


@torch.no_grad()
def correct(
    rollout_logprobs: Tensor,
    old_logprobs: Tensor,
    response_mask: Tensor,
    config: CorrectionConfig | ResolvedCorrection,
    *,
    logprobs: Tensor | None = None,
    advantages: Tensor | None = None,
) -> Correction:
    """Compute importance weights, rejection and their metrics in one pass.

    With rho_t = pi_old(t)/mu(t), the weight is rho_t (token), prod_t rho_t (sequence: unbiased, but its variance grows with the
    length) or exp(mean_t log rho_t) (geometric: a measure free of the length, but not an importance weight). Truncation (TIS) is
    min(w, upper); a mask (MIS, IcePop) sets weights beyond the bounds to 0. Both accept bias for less variance. Rejection drops
    tokens or sequences from the loss altogether. Log-ratios are clamped to +-20 for weights, rules and chi-squared; KL and
    perplexities use them as they are.

    In bypass mode, pass the current policy's log-probabilities as `old_logprobs`; the ratio is then pi/mu.

    Args:
        rollout_logprobs: log mu of the sampled tokens `[B, T]`, nats, any float dtype.
        old_logprobs: log pi_old of the same tokens `[B, T]`, nats.
        response_mask: 1 for tokens that are trained on `[B, T]`. Other tokens are not read.
        config: A `correction` section, or resolved settings.
        logprobs: log pi of the current policy `[B, T]`, for `off_policy_threshold`; None takes `old_logprobs`.
        advantages: `[B]` or `[B, T]`, for `off_policy_threshold`.

    Returns:
        Weights, mask and metrics.

    Raises:
        RecordError: Shapes differ, the mask holds values other than 0 and 1, nothing is unmasked, or advantages are missing.
        NonFiniteLogprobError: NaN or infinity in an unmasked position; names tensor, row and position.
        ConfigError: The section is malformed.
    """
    settings = config if isinstance(config, ResolvedCorrection) else resolve(config)
    mask = _checked(rollout_logprobs, old_logprobs, response_mask)
    # A converted mask is our own copy, so it may be written to, unless something reads it afterwards.
    read_later = settings.off_policy_threshold is not None or any(rule.over == "token" for rule in settings.rules)
    kept = mask.clone() if response_mask.dtype == torch.bool or read_later else mask
    dtype = output_dtype(rollout_logprobs, old_logprobs)
    weights = zeros(mask, dtype) if settings.level == "token" else None
    rows = scan(rollout_logprobs, old_logprobs, mask, settings, weights, kept)
    if not bool(rows.count.any()):
        raise RecordError("response_mask has no unmasked token; there is nothing to correct.")
    if weights is None:
        weights = torch.where(mask, _row_weights(rows, settings)[:, None].to(dtype), 0.0)
    metrics = summarise(rows, settings)
    if settings.level != "none":
        metrics |= weight_metrics(rows, settings)
        if settings.normalize:
            metrics["rollout_is_batch_norm_factor"] = mean = _mean_weight(rows, settings)
            weights /= mean
    keep = _kept_rows(rows, settings, metrics)
    if settings.off_policy_threshold is not None:
        keep &= _on_policy(rollout_logprobs, rows, mask, settings, logprobs, advantages, metrics)
    for row in (~keep).nonzero()[:, 0].tolist():
        kept[row] = False
    if settings.rules or settings.veto or settings.off_policy_threshold is not None:
        _kept_metrics(rows, keep, settings, metrics)
    return Correction(weights=weights, mask=kept, metrics=metrics)


def _checked(rollout: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    if not rollout.shape == old.shape == mask.shape or mask.dim() != 2:
        raise RecordError(
            f"rollout_logprobs {tuple(rollout.shape)}, old_logprobs {tuple(old.shape)} and response_mask {tuple(mask.shape)} "
            "need one shape [B, T]."
        )
    return as_bool("response_mask", mask)


def _row_weights(rows: Rows, settings: ResolvedCorrection) -> Tensor:
    """Return the weights of a sequence level `[B]`, and write their sums to `rows`."""
    if settings.level == "none":
        return torch.ones_like(rows.d)
    log_weight = rows.d if settings.level == "sequence" else rows.d / rows.count.clamp(min=1)
    raw = log_weight.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    weight = bounded(raw.clone(), settings)
    weight = torch.where(rows.count > 0, weight, 0.0)
    rows.weight = weight * rows.count
    rows.weight_spread = (weight - 1).square() * rows.count
    rows.weight_max, rows.weight_min = weight, weight
    return weight


def _mean_weight(rows: Rows, settings: ResolvedCorrection) -> float:
    if settings.level == "token":
        mean = rows.weight.sum() / rows.count.sum()
    else:
        filled = rows.count > 0
        mean = (rows.weight[filled] / rows.count[filled]).mean()
    return float(mean) if mean > 1e-8 else 1.0


def _kept_rows(rows: Rows, settings: ResolvedCorrection, metrics: dict[str, float]) -> Tensor:
    """Return which rows the sequence-level rules and the veto keep `[B]`."""
    keep = torch.ones_like(rows.count, dtype=torch.bool)
    for rule in settings.rules:
        low, high = bounds_of(rule, settings)
        if rule.over != "token":
            stat = _row_statistic(rows, rule)
            keep &= ((stat >= low) & (stat <= high)) | (rows.count == 0)
        else:
            stat = None
        metrics |= rule_metrics(rows, rule, stat, (low, high), settings)
    if settings.veto is not None:
        vetoed = (rows.d_min < math.log(settings.veto)) & (rows.count > 0)
        metrics["rollout_is_veto_fraction"] = float(vetoed.sum() / (rows.count > 0).sum())
        keep &= ~vetoed
    return keep


def _row_statistic(rows: Rows, rule: Rule) -> Tensor:
    if rule.over == "max":  # k2 and k3 grow with the distance from 0 on either side
        high = rows.d_max.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        low = rows.d_min.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        ends = torch.stack([high, low])
        stat = (ends.square() / 2 if rule.estimator == "k2" else torch.expm1(ends) - ends).amax(0)
        return torch.where(rows.count > 0, stat, 0.0)
    total = {"k1": -rows.c, "k2": rows.c_squares / 2, "k3": rows.ratio - rows.count - rows.c}[rule.estimator]
    return total if rule.over == "sum" else total / rows.count.clamp(min=1)


def _on_policy(
    rollout: Tensor,
    rows: Rows,
    mask: Tensor,
    settings: ResolvedCorrection,
    logprobs: Tensor | None,
    advantages: Tensor | None,
    metrics: dict[str, float],
) -> Tensor:
    """Return which rows DeepSeek-V3.2's mask keeps `[B]`: those with advantage >= 0, or mean log(mu/pi) <= threshold."""
    threshold = settings.off_policy_threshold or 0.0
    if advantages is None:
        raise RecordError("off_policy_threshold needs advantages: only sequences of negative advantage are dropped.")
    drift = -rows.d
    if logprobs is not None:
        if error := not_finite("logprobs", logprobs, mask):
            raise error
        drift = torch.where(mask, rollout.double() - logprobs.double(), 0.0).sum(1)
    advantage = advantages if advantages.dim() == 1 else torch.where(mask, advantages, 0.0).sum(1)
    keep = (advantage >= 0) | (drift / rows.count.clamp(min=1) <= threshold)
    metrics["off_policy_masked_fraction"] = float((~keep).sum() / max(int((rows.count > 0).sum()), 1))
    return keep


def _kept_metrics(rows: Rows, keep: Tensor, settings: ResolvedCorrection, metrics: dict[str, float]) -> None:
    left = torch.where(keep, rows.left, 0.0)
    sequences = len(left) if "verl_empty_rows" in settings.compat else int((rows.count > 0).sum())
    metrics["rollout_rs_masked_fraction"] = 1 - float(left.sum() / rows.count.sum())
    metrics["rollout_rs_seq_masked_fraction"] = float((left < rows.count).sum()) / sequences
