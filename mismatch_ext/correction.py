"""Importance weights and rejection masks for the gap between rollout policy mu and trainer policy pi.

The unmasked tokens are gathered once; everything is then a sum over them, or by row. The metrics have the names and definitions
of verl's rollout_corr_helper: means over sequences leave out rows without tokens, unless `compat` has `verl_empty_rows`, and
exponentials saturate at e^600.

Shapes: B rows, T tokens, n unmasked tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from mismatch_ext.config import CorrectionConfig, section_of, speaking_of
from mismatch_ext.errors import RecordError
from mismatch_ext.gap import SATURATION
from mismatch_ext.presets import Interval, ResolvedCorrection, resolve
from mismatch_ext.ranks import Ranks
from mismatch_ext.sums import Sums, over_ranks
from mismatch_ext.tensors import checked_mask, expect_finite, output_dtype

# Log-ratios are clamped to this before weights and rules, as in verl: e^20 is 4.9e8, beyond any bound in use.
LOG_RATIO_BOUND = 20.0
# Positions that are gathered together, because a batch of indices and of copies would take more memory than the result.
BLOCK = 1 << 18
SURE = 1e-12
"""Least probability of another token, where the policy is surer than float64 can tell."""

LOGGED: dict[str, Literal["tokens", "sequences", "weights", "max", "min", "moments"]] = {
    "rollout_is_mean": "tokens",
    "rollout_is_max": "max",
    "rollout_is_min": "min",
    "rollout_is_std": "moments",
    "rollout_is_eff_sample_size": "moments",
    "rollout_is_ratio_fraction_high": "weights",
    "rollout_is_ratio_fraction_low": "weights",
    "rollout_is_oob_ratio": "tokens",
    "rollout_is_batch_norm_factor": "weights",
    "rollout_is_veto_fraction": "sequences",
    "rollout_rs_masked_fraction": "tokens",
    "rollout_rs_seq_masked_fraction": "sequences",
}
"""Names, without prefix, of the weight and rejection metrics that every host logs, and how each is combined over ranks: a mean
over tokens or sequences (`weights`: over tokens for level `token`, otherwise over sequences), the largest or smallest value, or
a value computed from moments."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Correction:
    """The outcome of a correction.

    Weights `[B, T]` are float64 if an input is, otherwise float32, detached; 0 where there is no token, 1 at every token for
    level `none`. The mask `[B, T]` is True at tokens that are kept. The metrics have verl's names, without prefix.
    """

    weights: Tensor
    mask: Tensor
    metrics: dict[str, float]

    def as_multiplier(self) -> Tensor:
        """Return the weights `[B, T]`, 0 at rejected tokens, for a host that multiplies its per-token loss by them."""
        return self.weights.masked_fill(~self.mask, 0.0)


@torch.no_grad()
def correct(
    *,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    response_mask: Tensor,
    config: CorrectionConfig | ResolvedCorrection | Mapping[str, Any] | str,
    logprobs: Tensor | None = None,
    advantages: Tensor | None = None,
) -> Correction:
    """Compute importance weights, rejection and their metrics in one pass.

    With rho_t = pi_old(t)/mu(t), the weight is rho_t (token), prod_t rho_t (sequence: unbiased, but its variance grows with the
    length) or exp(mean_t log rho_t) (geometric: a measure free of the length, but not an importance weight). Truncation (TIS) is
    min(w, upper); CIS truncates a token at 1 + slope max(1 - pi_old, floor) (arXiv 2609.32444). A mask (MIS, IcePop) sets weights
    beyond the bounds to 0. All of them accept bias for less variance. Rejection drops tokens or sequences from the loss
    altogether. Log-ratios are clamped to +-20 for weights, rules and chi-squared; KL and perplexities use them as they are.

    In bypass mode, pass the current policy's log-probabilities as `old_logprobs`; the ratio is then pi/mu.

    All arguments are keywords, because two tensors in the wrong order would invert every weight without an error.

    Args:
        old_logprobs: log pi_old of the sampled tokens `[B, T]`, or of one sequence `[T]`, nats, any float dtype. The
            other tensors and the result have as many dimensions.
        rollout_logprobs: log mu of the same tokens `[B, T]`, nats.
        response_mask: 1 for tokens that are trained on `[B, T]`. Other tokens are not read.
        config: A `correction` section, a mapping of its keys, a preset's name, or resolved settings (`PRESETS`).
        logprobs: log pi of the current policy `[B, T]`, for `off_policy_threshold`; None takes `old_logprobs`.
        advantages: `[B]` or `[B, T]`, for `off_policy_threshold` and DPPO's losses.

    Returns:
        Weights, mask and metrics; zeros and no metrics if nothing is unmasked.

    Raises:
        RecordError: Shapes differ, the mask holds values other than 0 and 1, or advantages are missing.
        NonFiniteLogprobError: NaN or infinity in an unmasked position; names tensor, row and position.
        ConfigError: The section is malformed.
    """
    if isinstance(config, ResolvedCorrection):
        settings = config
    else:
        section = section_of(CorrectionConfig, config, "config", "preset")
        with speaking_of("config", "mismatch.correction"):
            settings = resolve(section)
    if old_logprobs.dim() == 1:
        of_row = correct(
            old_logprobs=old_logprobs[None], rollout_logprobs=rollout_logprobs[None], response_mask=response_mask[None],
            config=settings, logprobs=None if logprobs is None else logprobs[None],
            advantages=None if advantages is None else advantages[None],
        )  # fmt: skip
        return Correction(weights=of_row.weights[0], mask=of_row.mask[0], metrics=of_row.metrics)
    mask = checked_mask("response_mask", response_mask, old_logprobs=old_logprobs, rollout_logprobs=rollout_logprobs)
    if not bool(mask.any()):
        nothing = mask.to(output_dtype(old_logprobs, rollout_logprobs))
        return Correction(weights=nothing, mask=mask, metrics={})
    tokens = _Tokens(old=old_logprobs, rollout=rollout_logprobs, mask=mask, settings=settings)
    metrics = tokens.gap_metrics()
    dtype = output_dtype(old_logprobs, rollout_logprobs)
    kept_mask = mask.clone()
    if settings.level == "none":
        weights = mask.to(dtype)
    else:
        weight, weight_metrics = tokens.weigh()
        metrics |= weight_metrics
        if settings.normalize:
            factor = weight.mean() if settings.level == "token" else weight[tokens.present].mean()
            metrics["rollout_is_batch_norm_factor"] = divisor = float(factor) if factor > 1e-8 else 1.0
            weight = weight / divisor
        if settings.level == "token":
            weights = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
            for rows, part in tokens.blocks(weight):
                weights[rows].masked_scatter_(mask[rows], part.to(dtype))
        else:
            weights = torch.where(mask, weight[:, None].to(dtype), 0.0)
    keep_token, keep_row = tokens.rejected(metrics)
    if settings.divergence is not None:
        if advantages is None:
            raise RecordError(
                f"loss={settings.loss!r} needs advantages: their sign decides which way a token may not go."
            )
        inside = divergence_gate(
            logprobs=old_logprobs, rollout_logprobs=rollout_logprobs, advantages=advantages, settings=settings
        )[mask]
        keep_token = inside if keep_token is None else keep_token & inside
    if settings.off_policy_threshold is not None:
        keep_row &= tokens.on_policy(
            rollout=rollout_logprobs, mask=mask, logprobs=logprobs, advantages=advantages, metrics=metrics
        )
    left = tokens.count
    if keep_token is not None:
        kept_mask.masked_scatter_(mask, keep_token)
        left = tokens.by_row(keep_token.double())
    kept_mask &= keep_row[:, None]
    if settings.rules or settings.divergence or settings.veto or settings.off_policy_threshold is not None:
        left = torch.where(keep_row, left, 0.0)
        sequences = int(tokens.averaged.sum())
        metrics["rollout_rs_masked_fraction"] = 1 - float(left.sum()) / tokens.total
        metrics["rollout_rs_seq_masked_fraction"] = float((left < tokens.count).sum()) / sequences
    return Correction(weights=weights, mask=kept_mask, metrics=metrics)


@torch.no_grad()
def divergence_gate(
    *, logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor, settings: ResolvedCorrection
) -> Tensor:
    """Return which tokens DPPO's trust region lets through `[B, T]`, bool, by the current policy (arXiv 2602.04879).

    With p and q the probabilities of a token under policy and engine, its divergence is |p - q| (`dppo_tv`), or the KL of the
    two outcomes "this token" and "another": q log(q / p) + (1 - q) log((1 - q) / (1 - p)) (`dppo_kl`). A token is stopped if its
    divergence exceeds the bound and its advantage would move it further away: p > q with A > 0, or p < q with A <= 0. Compute it
    in each loss call, since p changes with every step.

    Args:
        logprobs: log p of the current policy `[B, T]`, nats.
        rollout_logprobs: log q of the engine `[B, T]`, nats.
        advantages: `[B]` or `[B, T]`.
        settings: With a loss of `DPPO` and its `divergence`.
    """
    policy, engine = logprobs.detach().double(), rollout_logprobs.double()
    p, q = policy.exp(), engine.exp()
    if settings.loss == "dppo_tv":
        divergence = (p - q).abs()
    else:
        p_other, q_other = (-torch.expm1(x.clamp(max=0.0)) for x in (policy, engine))
        of_others = torch.special.xlogy(q_other, q_other) - torch.special.xlogy(q_other, p_other.clamp(min=SURE))
        divergence = q * (engine - policy) + of_others
    rises = (advantages if advantages.dim() == 2 else advantages[:, None]) > 0
    low, high = settings.divergences
    moves_away = torch.where(rises, p > q, p < q)
    return ~(moves_away & (divergence > torch.where(rises, high, low)))


class _Tokens:
    """The unmasked tokens of a batch, row after row, with d = log pi_old - log mu, and c, which is d clamped."""

    def __init__(self, *, old: Tensor, rollout: Tensor, mask: Tensor, settings: ResolvedCorrection) -> None:
        self.settings = settings
        count = mask.sum(1)
        self.count, self.total = count.double(), float(count.sum())
        self._lengths = count
        self.present, self.length = count > 0, count.clamp(min=1).double()
        # Rows that count in means over sequences.
        self.averaged = torch.ones_like(self.present) if "verl_empty_rows" in settings.compat else self.present
        self.bound = None if settings.confidence is None else _confident(old.detach()[mask], settings.confidence)
        self.d = torch.empty(int(count.sum()), dtype=torch.float64, device=mask.device)
        ends, step = [0, *count.cumsum(0).tolist()], max(1, BLOCK // mask.shape[1])
        starts = range(0, len(mask), step)
        self._blocks = [
            (slice(start, start + step), slice(ends[start], ends[min(start + step, len(mask))])) for start in starts
        ]
        by_block = [
            _of_block(old=old.detach()[rows], rollout=rollout.detach()[rows], mask=mask[rows], d=d)
            for rows, d in self.blocks(self.d)
        ]
        self.old_row, self.d_row, self.excess_row = (torch.cat(sums) for sums in list(zip(*by_block, strict=True))[:3])
        self.k3, self.chi2 = torch.stack([sums[3] for sums in by_block]).sum(0).tolist()
        if not bool((self.d_row.isfinite() & self.old_row.isfinite()).all()):
            expect_finite(mask, old_logprobs=old, rollout_logprobs=rollout)
            raise RecordError("log-probabilities overflow float64 when summed; their unit must be nats.")
        self.smallest, self.largest = (float(x) for x in torch.aminmax(self.d))
        beyond = max(self.largest, -self.smallest) > LOG_RATIO_BOUND
        self.c = self.d.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND) if beyond else self.d
        self.c_row = self.by_row(self.c) if beyond else self.d_row

    def blocks(self, values: Tensor) -> list[tuple[slice, Tensor]]:
        """Return blocks of rows, each with its part of the tokens' values `[n]`."""
        return [(rows, values[tokens]) for rows, tokens in self._blocks]

    def by_row(self, values: Tensor) -> Tensor:
        """Return the sum of each row `[B]`."""
        return torch.segment_reduce(values, "sum", lengths=self._lengths, unsafe=True)

    def extreme(self, how: Literal["max", "min"]) -> Tensor:
        """Return the largest or smallest d of each row `[B]`, 0 in an empty one."""
        return torch.segment_reduce(self.d, how, lengths=self._lengths, unsafe=True, initial=None).where(
            self.present, 0.0
        )

    def gap_metrics(self) -> dict[str, float]:
        """Return the gap between the two policies: perplexities, KL and chi-squared."""
        rows = self.averaged
        trained = (self.old_row / self.length)[rows]
        rolled = ((self.old_row - self.d_row) / self.length)[rows]
        difference = rolled - trained
        sequence = self.d_row[rows].clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        return {
            "training_ppl": float((-trained).clamp(max=SATURATION).exp().mean()),
            "training_log_ppl": float(-trained.mean()),
            "kl": -float(self.d_row.sum()) / self.total,
            "k3_kl": self.k3 / self.total,
            "rollout_ppl": float((-rolled).clamp(max=SATURATION).exp().mean()),
            "rollout_log_ppl": float(-rolled.mean()),
            "log_ppl_diff": float(difference.mean()),
            "log_ppl_abs_diff": float(difference.abs().mean()),
            "log_ppl_diff_max": float(difference.max()),
            "log_ppl_diff_min": float(difference.min()),
            "ppl_ratio": float(difference.clamp(max=SATURATION).exp().mean()),
            "chi2_token": self.chi2 / self.total,
            "chi2_seq": float((2 * sequence).exp().mean()) - 1.0,
        }

    def weigh(self) -> tuple[Tensor, dict[str, float]]:
        """Return the weights before they are normalized, of tokens `[n]` or of rows `[B]`, and their metrics."""
        s = self.settings
        high = math.inf if s.upper is None else s.upper
        low = s.lower if s.lower is not None else 1 / high
        rows = self.averaged
        if s.level == "token":
            ratio = torch.expm1(self.c).add_(1.0)
            is_above = ratio > (high if self.bound is None else self.bound)
            above, below = (float(x.count_nonzero()) / self.total for x in (is_above, ratio < low))
            weight = _bound(ratio, s) if self.bound is None else torch.minimum(ratio, self.bound)
            row_weight, row_ratio = self.by_row(weight) / self.length, (self.excess_row + self.count) / self.length
            mean, variance = float(weight.sum()) / self.total, float(weight.var(correction=0))
            smallest, largest = (float(x) for x in torch.aminmax(weight))
            outside = above + below
        else:
            log_weight = self.d_row if s.level == "sequence" else self.d_row / self.length
            ratio = log_weight.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
            weight = torch.where(self.present, _bound(ratio.clone(), s), 0.0)
            row_weight, row_ratio = weight, torch.where(self.present, ratio, 0.0)
            mean = float((weight * self.count).sum()) / self.total
            variance = float(((weight - mean).square() * self.count).sum()) / self.total
            above, below = (float(x[rows].double().mean()) for x in (ratio > high, ratio < low))
            ends = torch.stack(torch.aminmax(log_weight[rows])).clamp(max=LOG_RATIO_BOUND).exp()
            smallest, largest = ends.tolist()
            outside = float((((ratio > high) | (ratio < low)) * self.count)[rows].sum()) / self.total
        squares = variance + mean * mean
        by_row, ratio_by_row = row_weight[rows], row_ratio[rows]
        metrics = {
            "rollout_is_mean": mean,
            "rollout_is_ratio_fraction_high": above,
            "rollout_is_ratio_fraction_low": below,
            "rollout_is_max": largest,
            "rollout_is_min": smallest,
            "rollout_is_std": variance**0.5 if self.total > 1 else 0.0,
            "rollout_is_eff_sample_size": mean * mean / squares if squares > 0 else 0.0,
            **_of_rows("rollout_is_seq", by_row),
            "rollout_is_seq_max_deviation": float((by_row - 1).abs().max()),
            "rollout_is_seq_fraction_high": float((ratio_by_row > high).double().mean()),
            "rollout_is_seq_fraction_low": float((ratio_by_row < low).double().mean()),
        }
        if s.bound in ("mask", "icepop") and s.lower is not None and s.upper is not None:
            metrics["rollout_is_oob_ratio"] = outside
        return weight, metrics

    def rejected(self, metrics: dict[str, float]) -> tuple[Tensor | None, Tensor]:
        """Return which tokens `[n]`, None for all, and which rows `[B]` the rules and the veto keep; adds to the metrics."""
        keep_token, keep_row = None, torch.ones_like(self.present)
        for name, bounds in self.settings.rules.items():
            low, high = self._interval(bounds)
            if name.startswith("token"):
                keep = self._token_rule(name, low, high, metrics)
                keep_token = keep if keep_token is None else keep_token & keep
            else:
                keep_row &= self._row_rule(name, low, high, metrics)
        if self.settings.veto is not None:
            vetoed = (self.extreme("min") < math.log(self.settings.veto)) & self.present
            metrics["rollout_is_veto_fraction"] = float(vetoed.sum() / self.present.sum())
            keep_row &= ~vetoed
        return keep_token, keep_row

    def _interval(self, bounds: Interval) -> tuple[float, float]:
        """Return where a rule keeps its statistic, which for k1 rules is -log rho; infinite below if it has no lower bound."""
        if bounds[0] is None:
            return -math.inf, bounds[1]
        low, high = torch.tensor(bounds, dtype=torch.float64).log().tolist()
        return (low, high) if "verl_inverse_k1" in self.settings.compat else (-high, -low)

    def _token_rule(self, name: str, low: float, high: float, metrics: dict[str, float]) -> Tensor:
        if name.endswith("k1"):
            stat = -self.c
        else:
            stat = self.c.square() / 2 if name.endswith("k2") else torch.expm1(self.c).sub_(self.c)
        above, below = stat > high, stat < low
        beyond = above | below
        inside = stat.clamp(low if low > -math.inf else 0.0, high)
        dropped = self.by_row(beyond.double())
        smallest, largest = (float(x) for x in torch.aminmax(stat))
        values = {
            "mean": float(stat.mean()),
            "max": largest,
            "min": smallest,
            "fraction_high": float(above.count_nonzero()) / self.total,
            "fraction_low": float(below.count_nonzero()) / self.total,
            "std": float(inside.std(unbiased=False)) if self.total > 1 else 0.0,
            "masked_fraction": float(dropped.sum()) / self.total,
            "seq_masked_fraction": float((dropped > 0).double().sum() / self.present.sum()),
        }
        by_row = (self.by_row(stat) / self.length)[self.present]
        metrics |= _of_rule(name, values, by_row, low, high)
        return ~beyond

    def _row_rule(self, name: str, low: float, high: float, metrics: dict[str, float]) -> Tensor:
        _, over, estimator = name.split("_")
        if over == "max":  # k2 and k3 grow with the distance from 0 on either side
            ends = torch.stack([self.extreme("max"), self.extreme("min")]).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
            stat = (ends.square() / 2 if estimator == "k2" else torch.expm1(ends) - ends).amax(0)
        else:
            if estimator == "k1":
                stat = -self.c_row
            else:
                stat = self.by_row(self.c.square()) / 2 if estimator == "k2" else self.excess_row - self.c_row
            stat = stat if over == "sum" else stat / self.length
        beyond = ((stat > high) | (stat < low)) & self.present
        by_row, share, out = stat[self.present], (self.count / self.total)[self.present], beyond[self.present].double()
        inside = by_row.clamp(low if low > -math.inf else 0.0, high)
        values = {
            "mean": float((by_row * share).sum()),
            "max": float(by_row.max()),
            "min": float(by_row.min()),
            "fraction_high": float((by_row > high).double().mean()),
            "fraction_low": float((by_row < low).double().mean()),
            "std": float(((inside - (inside * share).sum()).square() * share).sum()) ** 0.5 if self.total > 1 else 0.0,
            "masked_fraction": float((out * share).sum()),
            "seq_masked_fraction": float(out.mean()),
        }
        metrics |= _of_rule(name, values, by_row, low, high)
        return ~beyond

    def on_policy(
        self,
        *,
        rollout: Tensor,
        mask: Tensor,
        logprobs: Tensor | None,
        advantages: Tensor | None,
        metrics: dict[str, float],
    ) -> Tensor:
        """Return which rows DeepSeek-V3.2's mask keeps `[B]`: those with advantage >= 0, or mean log(mu/pi) <= threshold."""
        if advantages is None:
            raise RecordError(
                "off_policy_threshold needs advantages: only sequences of negative advantage are dropped."
            )
        drift = -self.d_row
        if logprobs is not None:
            expect_finite(mask, logprobs=logprobs)
            drift = torch.where(mask, rollout.double() - logprobs.double(), 0.0).sum(1)
        advantage = advantages if advantages.dim() == 1 else torch.where(mask, advantages, 0.0).sum(1)
        keep = (advantage >= 0) | (drift / self.length <= (self.settings.off_policy_threshold or 0.0))
        metrics["off_policy_masked_fraction"] = float((~keep).sum() / max(int(self.present.sum()), 1))
        return keep


def _at_least_float32(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()


def _of_block(*, old: Tensor, rollout: Tensor, mask: Tensor, d: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Write d of a block of rows; return the sums of log pi_old, d and rho - 1 of each row, and those of k3 and of rho^2 - 1."""
    places, lengths = mask.flatten().nonzero()[:, 0], mask.sum(1)
    trained, sampled = (_at_least_float32(x.flatten().index_select(0, places)) for x in (old, rollout))
    d.copy_(trained - sampled)
    excess = torch.expm1(d.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND))  # rho - 1
    rows = (torch.segment_reduce(x, "sum", lengths=lengths, unsafe=True) for x in (trained.double(), d, excess))
    old_row, d_row, excess_row = rows
    clamped = bool((d.abs() > LOG_RATIO_BOUND).any())
    unclamped = torch.expm1(d.clamp(max=SATURATION)).sum() if clamped else excess.sum()
    # rho^2 - 1 = x^2 + 2 x with x = rho - 1.
    totals = torch.stack([unclamped - d.sum(), excess @ excess + 2 * excess.sum()])
    return old_row, d_row, excess_row, totals


def _confident(old: Tensor, confidence: tuple[float, float]) -> Tensor:
    """Return the upper bound of the weight of tokens `[n]`, from the policy's log-probabilities of them."""
    slope, floor = confidence
    unsure = -torch.expm1(old.double())  # 1 - pi, which is accurate where pi is nearly 1
    return 1 + slope * unsure.clamp(min=floor)


def _bound(weight: Tensor, settings: ResolvedCorrection) -> Tensor:
    """Bound weights in place."""
    if settings.bound in ("truncate", "clip"):
        return weight.clamp_(min=settings.lower, max=settings.upper)
    low, high = settings.lower or 0.0, math.inf if settings.upper is None else settings.upper
    return weight.masked_fill_((weight < low) | (weight > high), 0.0)


def _of_rows(name: str, values: Tensor) -> dict[str, float]:
    std = float(values.std()) if len(values) > 1 else 0.0
    return {
        f"{name}_mean": float(values.mean()),
        f"{name}_std": std,
        f"{name}_max": float(values.max()),
        f"{name}_min": float(values.min()),
    }


def _of_rule(name: str, values: dict[str, float], by_row: Tensor, low: float, high: float) -> dict[str, float]:
    values |= _of_rows("seq", by_row) | {"seq_max_deviation": float(by_row.abs().max())}
    values["seq_fraction_high"] = float((by_row > high).double().mean())
    if low > -math.inf:
        values["seq_fraction_low"] = float((by_row < low).double().mean())
    return {f"rollout_rs_{name}_{key}": value for key, value in values.items()}


def metrics_over_ranks(
    metrics: Mapping[str, float], mask: Tensor, settings: ResolvedCorrection, ranks: Ranks
) -> dict[str, float]:
    """Return the metrics of `LOGGED` over all ranks' tokens, by one all-reduce; `metrics` are {} on a rank without tokens."""
    sums = over_ranks(_logged_sums(metrics, mask.bool(), settings), ranks)
    merged: dict[str, float] = {}
    for name, over in LOGGED.items():
        if over in ("max", "min"):
            value = float(sums[f"max:{name}"])
            known = math.isfinite(value)
            merged |= {name: value if over == "max" else -value} if known else {}
        elif over != "moments" and (weight := float(sums[f"weight/{name}"])):
            merged[name] = float(sums[name]) / weight
    count, mean, squares = sums["moments:weight"].tolist()
    if settings.level != "none" and count:
        variance = squares / count
        merged["rollout_is_std"] = variance**0.5
        merged["rollout_is_eff_sample_size"] = mean * mean / (variance + mean * mean) if variance + mean else 0.0
    return {name: merged[name] for name in LOGGED if name in merged}


def _logged_sums(metrics: Mapping[str, float], mask: Tensor, settings: ResolvedCorrection) -> Sums:
    """Return one rank's part of the metrics of `LOGGED`; the names are the same on a rank without tokens."""
    tokens, sequences = float(mask.sum()), float(mask.any(-1).sum())
    values: dict[str, float] = {}
    for name, over in LOGGED.items():
        if over in ("max", "min"):
            values[f"max:{name}"] = metrics.get(name, -math.inf) if over == "max" else -metrics.get(name, math.inf)
        elif over != "moments":
            by_sequence = over == "sequences" or (over == "weights" and settings.level != "token")
            weight = (sequences if by_sequence else tokens) if name in metrics else 0.0
            values |= {name: weight * metrics.get(name, 0.0), f"weight/{name}": weight}
    sums = {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
    weighted = "rollout_is_std" in metrics
    moments = [tokens, metrics["rollout_is_mean"], tokens * metrics["rollout_is_std"] ** 2] if weighted else [0.0] * 3
    return sums | {"moments:weight": torch.tensor(moments, dtype=torch.float64)}


# What a mask or a rejection throws away, whoever decides it.

QUARTERS = 4
CONFIDENCE = 1.282
"""Standard errors from an estimate to the end of its 80 % interval; three logs in a row are beyond it by chance once in 1000."""


def masked_sums(kept_mask: Tensor, response_mask: Tensor) -> Sums:
    """Count tokens and responses by quarter of response length `[4]`, and those of them that a correction masks.

    `kept_mask` is not 0 at tokens that keep a weight `[B, T]`, or of responses `[B, 1]`. The first quarter is the shortest.
    """
    mask = response_mask.bool()
    return masked_sums_of(mask.sum(1), (mask & kept_mask.bool()).sum(1))


def masked_sums_of(lengths: Tensor, left: Tensor) -> Sums:
    """Return `masked_sums` from the tokens of each response, and those of them that keep a weight, both `[B]`."""
    sampled = lengths > 0
    lengths, left = lengths[sampled].cpu(), left[sampled].cpu()
    lengths, order = lengths.sort(stable=True)
    left = left[order]
    quarter = torch.arange(len(lengths)) * QUARTERS // max(len(lengths), 1)
    columns = {"responses": torch.ones_like(lengths), "masked_responses": left == 0}
    columns |= {"tokens": lengths, "masked_tokens": lengths - left}
    nothing = torch.zeros(QUARTERS, dtype=torch.float64)
    return {name: nothing.index_add(0, quarter, values.double()) for name, values in columns.items()}


def masked_metrics(sums: Sums) -> dict[str, float]:
    """Return the shares that are masked, by the names of names.toml; {} if nothing was counted or nothing can be masked."""
    of = {name: values.tolist() for name, values in sums.items()}
    if not sum(of["responses"]):
        return {}
    metrics: dict[str, float] = {}
    for name, unit in (("masked_seq_frac", "responses"), ("masked_token_frac", "tokens")):
        masked, whole = of[f"masked_{unit}"], of[unit]
        metrics[name] = sum(masked) / sum(whole)
        metrics |= {f"{name}/q{i + 1}": masked[i] / whole[i] for i in range(QUARTERS) if whole[i]}
    # Lower end of the interval of a risk ratio (Katz et al. 1978); with half a response added, few responses show nothing.
    (short, shorts), (long, longs) = ((of["masked_responses"][i] + 0.5, of["responses"][i] + 0.5) for i in (0, -1))
    spread = math.sqrt(1 / long - 1 / longs + 1 / short - 1 / shorts)
    ratio = long / longs / (short / shorts)
    return metrics | {"masked_long_ratio_low": ratio * math.exp(-CONFIDENCE * spread)}
