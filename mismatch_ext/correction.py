"""Importance weights and rejection masks for the gap between rollout policy mu and trainer policy pi.

The unmasked tokens are gathered once; everything is then a sum over them, or by row. The metrics have the names and definitions
of verl's rollout_corr_helper; means over sequences leave out rows without tokens, unless `compat` has `verl_empty_rows`. How far
the policies are apart is measured by `mismatch_ext.gap`.

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
from mismatch_ext.gap import k3
from mismatch_ext.presets import Interval, ResolvedCorrection, resolve
from mismatch_ext.sums import Sums
from mismatch_ext.tensors import checked_mask, expect_finite, output_dtype

# Log-ratios are clamped to this before weights and rules, as in verl: e^20 is 4.9e8, beyond any bound in use.
LOG_RATIO_BOUND = 20.0
SURE = 1e-12
"""Least probability of another token, where the policy is surer than float64 can tell."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Correction:
    """The outcome of a correction.

    Weights `[B, T]` are float64 if an input is, otherwise float32, detached; 0 where there is no token, 1 at every token for
    level `none`. The mask `[B, T]` is True at tokens that are kept. The sums have the same names on every rank.
    """

    weights: Tensor
    mask: Tensor
    sums: Sums

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of this batch alone, see `correction_metrics`."""
        return correction_metrics(self.sums)

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
    """Compute importance weights, rejection and the sums of their metrics in one pass.

    With rho_t = pi_old(t)/mu(t), the weight is rho_t (token), prod_t rho_t (sequence: unbiased, but its variance grows with the
    length) or exp(mean_t log rho_t) (geometric: a measure free of the length, but not an importance weight). Truncation (TIS) is
    min(w, upper); CIS truncates a token at 1 + slope max(1 - pi_old, floor) (arXiv 2609.32444). A mask (MIS, IcePop) sets weights
    beyond the bounds to 0. All of them accept bias for less variance. Rejection drops tokens or sequences from the loss
    altogether. Log-ratios are clamped to +-20 for weights and rules.

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
        Weights, mask and sums. If nothing is unmasked, weights and sums are zeros, and there are no metrics.

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
        return Correction(weights=of_row.weights[0], mask=of_row.mask[0], sums=of_row.sums)
    mask = checked_mask("response_mask", response_mask, old_logprobs=old_logprobs, rollout_logprobs=rollout_logprobs)
    tokens = _Tokens(old=old_logprobs, rollout=rollout_logprobs, mask=mask, settings=settings)
    sums: Sums = {}
    dtype = output_dtype(old_logprobs, rollout_logprobs)
    if settings.level == "none":
        weights = mask.to(dtype)
    else:
        weight = tokens.weigh(sums)
        if settings.level == "token":
            weights = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_scatter_(mask, weight.to(dtype))
        else:
            weights = torch.where(mask, weight[:, None].to(dtype), 0.0)

    keep_token, keep_row = tokens.keep(sums)
    if settings.divergence is not None:
        if advantages is None:
            raise RecordError(
                f"loss={settings.loss!r} needs advantages: their sign decides which way a token may not go."
            )
        inside = divergence_gate(
            logprobs=old_logprobs, rollout_logprobs=rollout_logprobs, advantages=advantages, settings=settings
        )
        keep_token &= inside[mask]
    if settings.off_policy_threshold is not None:
        keep_row &= tokens.on_policy(
            rollout=rollout_logprobs, mask=mask, logprobs=logprobs, advantages=advantages, sums=sums
        )

    kept_mask = mask.clone().masked_scatter_(mask, keep_token) & keep_row[:, None]
    if settings.rules or settings.divergence or settings.veto or settings.off_policy_threshold is not None:
        left = kept_mask.sum(1)
        sums["rollout_rs_masked_fraction"] = _share(tokens.count - left, tokens.count)
        sums["rollout_rs_seq_masked_fraction"] = _share(left < tokens.count, tokens.averaged)
    return Correction(weights=weights, mask=kept_mask, sums=sums)


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
    """The unmasked tokens of a batch, row after row, with d = log pi_old - log mu `[n]`, and c, which is d clamped."""

    def __init__(self, *, old: Tensor, rollout: Tensor, mask: Tensor, settings: ResolvedCorrection) -> None:
        self.settings = settings
        self._lengths = mask.sum(1)
        self.count = self._lengths.double()
        self.present, self.length = self._lengths > 0, self.count.clamp(min=1)
        # Rows that count in means over sequences.
        self.averaged = torch.ones_like(self.present) if "verl_empty_rows" in settings.compat else self.present
        self.old = _at_least_float32(old.detach().masked_select(mask))
        sampled = _at_least_float32(rollout.detach().masked_select(mask))
        self.d = (self.old - sampled).double()
        self.d_row = self.by_row(self.d, "sum")
        if not bool(self.d_row.isfinite().all()):
            expect_finite(mask, old_logprobs=old, rollout_logprobs=rollout)
            raise RecordError("log-probabilities overflow float64 when summed; their unit must be nats.")
        self.c = self.d.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)

    def by_row(self, values: Tensor, how: Literal["sum", "max", "min"]) -> Tensor:
        """Return the sum, or the largest or smallest value, of each row `[B]`; 0 in an empty one."""
        reduced = torch.segment_reduce(values, how, lengths=self._lengths, unsafe=True)
        return torch.where(self.present, reduced, 0.0)

    def weigh(self, sums: Sums) -> Tensor:
        """Return the weights of tokens `[n]`, or of rows `[B]`; adds to the sums, which are of weights before `normalize`."""
        s = self.settings
        high = math.inf if s.upper is None else s.upper
        low = s.lower if s.lower is not None else 1 / high
        upper: float | Tensor = high
        if s.level == "token":
            ratio = torch.expm1(self.c).add_(1.0)
            if s.confidence is None:
                weight = _bound(ratio.clone(), s)
            else:
                upper = _confident(self.old, s.confidence)
                weight = torch.minimum(ratio, upper)
            extremes = weight
            averaged = weighed = torch.ones_like(ratio, dtype=torch.bool)
            tokens = torch.ones_like(ratio)
        else:
            log_weight = self.d_row if s.level == "sequence" else self.d_row / self.length
            ratio = log_weight.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
            weight = torch.where(self.present, _bound(ratio.clone(), s), 0.0)
            averaged, weighed, tokens = self.averaged, self.present, self.count
            # As verl has it: of ratios before they are bounded, which may vanish.
            extremes = log_weight[averaged].clamp(max=LOG_RATIO_BOUND).exp()

        above, below = ratio > upper, ratio < low
        sums["moments:weight"] = _weighted_moments(weight.double(), tokens.double())
        sums["max:rollout_is_max"], sums["max:rollout_is_min"] = _largest(extremes), _largest(-extremes)
        sums["rollout_is_ratio_fraction_high"] = _share(above & averaged, averaged)
        sums["rollout_is_ratio_fraction_low"] = _share(below & averaged, averaged)
        if s.bound in ("mask", "icepop") and s.lower is not None and s.upper is not None:
            sums["rollout_is_oob_ratio"] = _share((above | below) * tokens, tokens)
        if not s.normalize:
            return weight
        factor = float(weight[weighed].mean())
        divisor = factor if factor > 1e-8 else 1.0
        sums["rollout_is_batch_norm_factor"] = _share(weighed.double() * divisor, weighed)
        return weight / divisor

    def keep(self, sums: Sums) -> tuple[Tensor, Tensor]:
        """Return which tokens `[n]` and which rows `[B]` the rules and the veto keep; adds to the sums."""
        keep_token = torch.ones_like(self.d, dtype=torch.bool)
        keep_row = torch.ones_like(self.present)
        for name, bounds in self.settings.rules.items():
            low, high = self._interval(bounds)
            statistic = self._statistic(name)
            is_inside = (statistic <= high) & (statistic >= low)
            if name.startswith("token"):
                keep_token &= is_inside
            else:
                keep_row &= is_inside | ~self.present
        if self.settings.veto is not None:
            vetoed = (self.by_row(self.d, "min") < math.log(self.settings.veto)) & self.present
            sums["rollout_is_veto_fraction"] = _share(vetoed, self.present)
            keep_row &= ~vetoed
        return keep_token, keep_row

    def _interval(self, bounds: Interval) -> tuple[float, float]:
        """Return where a rule keeps its statistic, which for k1 rules is -log rho; infinite below if it has no lower bound."""
        if bounds[0] is None:
            return -math.inf, bounds[1]
        low, high = torch.tensor(bounds, dtype=torch.float64).log().tolist()
        return (low, high) if "verl_inverse_k1" in self.settings.compat else (-high, -low)

    def _statistic(self, rule: str) -> Tensor:
        """Return what a rule looks at: k1, k2 or k3 of each token `[n]`, or their sum, mean or largest of each row `[B]`."""
        *_, over, estimator = rule.split("_")
        match estimator:
            case "k1":
                of_tokens = -self.c
            case "k2":
                of_tokens = self.c.square() / 2
            case _:
                of_tokens = k3(self.c)
        match over:
            case "token":
                return of_tokens
            case "max":
                return self.by_row(of_tokens, "max")
            case "mean":
                return self.by_row(of_tokens, "sum") / self.length
            case _:
                return self.by_row(of_tokens, "sum")

    def on_policy(
        self,
        *,
        rollout: Tensor,
        mask: Tensor,
        logprobs: Tensor | None,
        advantages: Tensor | None,
        sums: Sums,
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
        sums["off_policy_masked_fraction"] = _share(~keep, self.present)
        return keep


def _at_least_float32(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()


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


def _share(part: Tensor, whole: Tensor) -> Tensor:
    """Return the sums of two columns `[2]`, whose ratio is a metric."""
    return torch.stack([part.double().sum(), whole.double().sum()]).cpu()


def _largest(values: Tensor) -> Tensor:
    return values.max().double().cpu() if len(values) else torch.tensor(-math.inf, dtype=torch.float64)


def _weighted_moments(values: Tensor, counts: Tensor) -> Tensor:
    """Return the entry `moments:name` of values `[n]`, each of which counts so often."""
    count = counts.sum()
    mean = (values * counts).sum() / count.clamp(min=1)
    return torch.stack([count, mean, ((values - mean).square() * counts).sum()]).cpu()


def correction_metrics(sums: Sums) -> dict[str, float]:
    """Return the metrics of the sums of corrections, merged over batches or ranks, by verl's names; one of nothing is left out.

    They are those of the table `correction` in names.toml that the settings have, and `off_policy_masked_fraction`.
    """
    metrics: dict[str, float] = {}
    for name, value in sums.items():
        if name == "moments:weight":
            count, mean, squares = value.tolist()
            variance = squares / max(count, 1.0)
            if count:
                metrics["rollout_is_mean"] = mean
                metrics["rollout_is_std"] = variance**0.5
                metrics["rollout_is_eff_sample_size"] = mean * mean / (variance + mean * mean) if mean else 0.0
        elif name.startswith("max:"):
            largest = float(value)
            if math.isfinite(largest):
                metrics[name.removeprefix("max:")] = -largest if name.endswith("min") else largest
        else:
            part, whole = value.tolist()
            if whole:
                metrics[name] = part / whole
    return metrics


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
