"""The gap between rollout and trainer log-probabilities of sampled tokens.

    sums = gap_sums(old=old, rollout=rollout, mask=mask)  # one batch, or one rank's part of it
    sums = merged(sums, others)  # any number of batches and ranks, see `mismatch_ext.sums`
    metrics = gap_metrics(sums)  # {"k3_kl": ..., "ess_seq": ..., ...}

Of a large batch, the means may be those of some sequences (`rows_of_means`), with their standard errors. Largest values, and
shares of tokens and sequences beyond a threshold, are always of all.

The formulas of all metrics are in names.toml. Shapes: B sequences, T tokens, n unmasked tokens, m sequences that have one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cached_property
from statistics import median
from typing import Any

import torch
from torch import Tensor

from mismatch_ext.errors import RecordError
from mismatch_ext.names import TAUS
from mismatch_ext.sums import Sums, merged, moments
from mismatch_ext.tensors import checked_mask, non_finite

# Largest exponent; larger log-ratios are cut and counted. exp(600) is 4e260, so a sum over 1e47 tokens still fits float64;
# with exp(700), the sum would overflow at the 18,000th token.
SATURATION = 600.0
# In float64, expm1(d) - d keeps a relative accuracy of 1e-10 down to this d; below it, two terms of the series are better.
SERIES_BELOW = 1e-5
# verl cuts log-ratios here before squaring them, so chi-square means the same in both.
CHI2_CUT = 20.0
# Of each row, in the order of `moments:rows`: its tokens, and the sums of what these are the means of.
ROW_VARIABLES = ("tokens", "logp_abs_diff_mean", "kl", "k3_kl")
PROFILES: dict[str, tuple[float, ...]] = {
    "position": (0.0, *(float(2**k) for k in range(18))),
    "probability": (0, 1e-6, 1e-4, 1e-3, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 0.999, 1),
}
"""Edges of the bins of each profile; bin i covers edges[i] <= x < edges[i + 1], and the last bin includes its upper edge too."""
MEANS_OF = 4_000_000
"""Tokens of a batch above which the means are measured on a sample of its sequences, with about so many tokens."""
SURE = 1e-4
"""Probability that a token leaves to all others, below which its log-odds are not counted: a float32 log-probability, whose error
is about 1e-7, is then off by more than a thousandth of it."""
BLOCKS = 16
"""Blocks of responses for the median of means: up to seven of them may hold an outlier. A choice."""
COVERED = 0.95
"""Least coverage of the interval of the median of means."""
FIXED_POINT = 1 << 20
"""Parts of a nat in which a response's block is drawn, so that the sum over its tokens is the same in any order."""
TOGETHER = 1 << 20
"""Tokens that are measured together, because a large batch widened to float64 would take gigabytes."""


def k3(log_ratio: Tensor) -> Tensor:
    """Return the k3 estimate exp(d) - 1 - d of each log-ratio, float64, nats (Schulman 2020, joschu.net/blog/kl-approx.html).

    In float32 that has an error of 100 % at d = 1e-4, a typical value in a float16 run; here it is `expm1(d) - d`, or a series.
    """
    direct = torch.expm1(log_ratio.clamp(max=SATURATION)).sub_(log_ratio)
    series = log_ratio * log_ratio * (0.5 + log_ratio / 6)
    return torch.where(log_ratio.abs() < SERIES_BELOW, series, direct)


def rows_of_means(lengths: Tensor, seed: int, tokens: int = MEANS_OF) -> Tensor:
    """Return the sequences whose means `gap_sums` is to measure: a simple random sample if the batch has more than `tokens`.

    The sequences are drawn without replacement, each with the same probability. Every process draws the same ones.

    Args:
        lengths: Tokens of each sequence `[B]`; one without tokens is never drawn.
        seed: Seed of the choice.
        tokens: Number of tokens that the sample has on average.

    Returns:
        Whether each sequence is in the sample `[B]`, bool.
    """
    present = (lengths > 0).nonzero()[:, 0].cpu()
    whole = int(lengths.sum())
    if whole <= tokens:
        return torch.ones(len(lengths), dtype=torch.bool)
    count = math.ceil(len(present) * tokens / whole)
    order = torch.randperm(len(present), generator=torch.Generator().manual_seed(seed))
    # Two, because the error of one cannot be estimated.
    chosen = present[order[: max(count, 2)]]
    return torch.zeros(len(lengths), dtype=torch.bool).index_fill_(0, chosen, True)


def log_odds(logprobs: Tensor) -> Tensor:
    """Return log(p / (1 - p)) of natural-log probabilities, float64, accurate also as p comes near 1.

    1 - p is `-expm1(log p)`. Probabilities above 1 - `SURE` count as that, because 1 - p is rounding there.
    """
    known = logprobs.double().clamp(max=math.log1p(-SURE))
    return known - (-torch.expm1(known)).log()


def median_of_means(sums: Tensor, counts: Tensor) -> tuple[float, float | None, float | None]:
    """Return the median of the means of blocks, and both ends of its interval.

    It stays where it is if less than half of the blocks hold an outlier (Nemirovsky and Yudin 1983; Lugosi and Mendelson 2019,
    arXiv 1906.04280). The interval of at least `COVERED` is between two order statistics of the blocks' means, by the binomial
    distribution, so that it assumes nothing about the tails. It is an interval of the median of such means, which lies below the
    mean of a distribution with a long upper tail.

    Args:
        sums: Sum over the entries of each block `[K]`.
        counts: Number of entries of each block `[K]`; a block without any is left out.

    Returns:
        The median, and the lower and upper end; None for both if fewer than six blocks have an entry. NaN if no block has one.
    """
    filled = counts > 0
    means = (sums[filled].double() / counts[filled]).sort().values.tolist()
    if not means:
        return math.nan, None, None
    count = len(means)
    # How many of the smallest, and of the largest, are left out: as many as the coverage allows.
    outside, beyond = -1, 0.0
    while 2 * (beyond + math.comb(count, outside + 1) / 2**count) <= 1 - COVERED:
        outside += 1
        beyond += math.comb(count, outside) / 2**count
    if outside < 0:
        return median(means), None, None
    return median(means), means[outside], means[count - 1 - outside]


def gap_sums(
    *,
    old: Tensor,
    rollout: Tensor,
    mask: Tensor,
    lengths: Tensor | None = None,
    means: Tensor | None = None,
    sample: int = 0,
    seed: int = 0,
) -> Sums:
    """Sum up the gap d = log pi_old - log mu of the sampled tokens, per token and per sequence, in float64.

    Args:
        old: Trainer's log-probabilities at sampling time `[B, T]`, or of one sequence `[T]`, any float dtype, nats.
        rollout: Engine's log-probabilities `[B, T]`, any float dtype, nats.
        mask: True, or 1, at the policy's own tokens `[B, T]`. The other places are not read. A token's position in the profile is
            its number among these tokens of its row, so that tokens of tools do not count.
        lengths: If the rows are concatenated without padding, `[R]` each, the places of each row `[B]`, which add up to R.
        means: The sequences that means and profiles are of `[B]`, bool, as `rows_of_means` draws them; None for all.
        sample: Tokens that are kept for a scatter plot, drawn uniformly from these sequences.
        seed: Seed of that choice; it must differ between batches and ranks.

    Returns:
        Sums with the same names and shapes for every batch, also for one without tokens.

    Raises:
        RecordError: Shapes differ, a dtype is wrong, or the mask holds other values than 0 and 1.
        NonFiniteLogprobError: An unmasked value is NaN or infinite; the message names tensor, row, position and value.
    """
    if lengths is None and old.dim() == 1:
        old, rollout, mask = old[None], rollout[None], mask[None]
    shape = "[B, T]" if lengths is None else "[R]"
    mask = checked_mask("response_mask", mask, shape, old_logprobs=old, rollout_logprobs=rollout)
    if lengths is None:
        lengths = torch.full((mask.shape[0],), mask.shape[1], device=mask.device)
    elif int(lengths.sum()) != len(mask) or bool((lengths < 0).any()):
        raise RecordError(
            f"lengths {lengths.tolist()[:8]} ... must be >= 0 and add up to the {len(mask)} places of the rows."
        )
    old, rollout, mask = (x.detach().flatten() for x in (old, rollout, mask))
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for rows, places in _chunks(lengths.tolist()):
        chunk = {"old": old[places], "rollout": rollout[places], "lengths": lengths[rows], "first": rows.start}
        every = _Tokens(mask=mask[places], **chunk)
        of_means = every
        if means is not None and not bool(means[rows].all()):
            drawn = means[rows].to(mask.device).repeat_interleave(lengths[rows])
            of_means = _Tokens(mask=mask[places] & drawn, **chunk)
        found = every.tails()
        found |= of_means.means() | of_means.blocks() | of_means.profiles()
        parts.append(found | of_means.sample(sample, generator))
    return merged(*parts)


def gap_metrics(sums: Sums, *, support_truncated: bool = False) -> dict[str, float]:
    """Return the gap's metrics by name, such as `k3_kl`, the mean of exp(d) - 1 - d (Schulman 2020) in nats per token.

    docs/metrics.md has the formula and unit of each.

    Args:
        sums: Sums from `gap_sums`, or several of them merged.
        support_truncated: Whether top-p, top-k or min-p truncated the distribution that the tokens were sampled from.

    Returns:
        Metrics without prefix; empty if no token was counted.
    """
    s = {name: value.item() for name, value in sums.items() if value.dim() == 0}
    tokens, sequences = s["tokens"], s["sequences"]
    if not tokens:
        return {}
    metrics = {
        "tokens": tokens,
        "sequences": sequences,
        "logp_abs_diff_max": s["max:abs"],
        "k3_saturated_frac": s["saturated"] / tokens,
        "seq_k3_saturated_frac": s["seq_saturated"] / sequences,
        "seq_logp_abs_diff_max": s["max:seq_abs"],
        **{f"f_{tau:g}": s[f"f_{tau:g}"] / tokens for tau in TAUS},
        "log_ppl_diff_max": s["max:log_ppl_diff"],
        "log_ppl_diff_min": -s["max:-log_ppl_diff"],
        "rollout_probs_diff_max": s["max:p_abs"],
        "support_truncated": float(support_truncated),
    }
    n, m = s["mean_tokens"], s["mean_sequences"]
    if not n:  # each sequence of the sample was a bad row
        return metrics
    metrics |= {
        "logp_abs_diff_mean": s["abs"] / n,
        "kl": -s["d"] / n,
        "k3_kl": s["k3"] / n,
        **_robust_k3(sums["block_k3"], sums["block_tokens"]),
        **({"log_odds_abs_diff_mean": s["log_odds_abs"] / s["unsure"]} if s["unsure"] else {}),
        "seq_kl": -s["seq"] / m,
        "seq_k3_kl": s["seq_k3"] / m,
        "seq_logp_abs_diff_mean": s["seq_abs"] / m,
        "ess_token": math.exp(2 * s["logsumexp:d"] - s["logsumexp:2d"]) / n,
        "ess_seq": math.exp(2 * s["logsumexp:seq"] - s["logsumexp:2seq"]) / m,
        "chi2_token": s["r_squared"] / n - 1,
        "chi2_seq": s["seq_r_squared"] / m - 1,
        "training_ppl": s["old_ppl"] / m,
        "training_log_ppl": s["old_log_ppl"] / m,
        "rollout_ppl": s["rollout_ppl"] / m,
        "rollout_log_ppl": s["rollout_log_ppl"] / m,
        "log_ppl_diff": s["log_ppl_diff"] / m,
        "log_ppl_abs_diff": s["log_ppl_abs_diff"] / m,
        "ppl_ratio": s["ppl_ratio"] / m,
        "rollout_probs_diff_mean": s["p_abs"] / n,
        "rollout_probs_pearson": _pearson(sums["moments:p"]),
    }
    if m < sequences:
        metrics |= {"mean_tokens": n, **_standard_errors(sums["moments:rows"], sequences)}
    return metrics


def _standard_errors(rows: Tensor, sequences: float) -> dict[str, float]:
    """Return the standard errors of means over tokens, from the moments of the sampled rows and the number of all rows.

    A mean is a ratio R of two sums over rows, of values y and of tokens n. Its error is that of the mean of y - R n, divided by
    the mean of n, for rows drawn without replacement (Cochran, Sampling Techniques, 1977, 6.4).
    """
    variables = len(ROW_VARIABLES)
    count = float(rows[0])
    means, products = rows[1 : 1 + variables], rows[1 + variables :].view(variables, variables)
    if count < 2:
        return {}
    left_out = 1 - count / sequences
    errors = {}
    for at, name in enumerate(ROW_VARIABLES[1:], start=1):
        ratio = means[at] / means[0]
        squares = products[at, at] - 2 * ratio * products[at, 0] + ratio**2 * products[0, 0]
        variance = float(squares.clamp(min=0)) / (count - 1)
        errors[f"{name}_error"] = math.sqrt(left_out * variance / count) / float(means[0])
    return errors


def gap_profiles(sums: Sums) -> dict[str, dict[str, list[Any]]]:
    """Return the gap per bin of `PROFILES`: edges, token count, mean and largest |d|, mean k3; None in an empty bin."""
    profiles: dict[str, dict[str, list[Any]]] = {}
    for name, edges in PROFILES.items():
        count = sums[f"{name}/count"]
        per_bin = {
            "abs_diff_mean": sums[f"{name}/abs"] / count,
            "abs_diff_max": sums[f"{name}/max:abs"],
            "k3_mean": sums[f"{name}/k3"] / count,
        }
        columns: dict[str, list[Any]] = {
            key: [x if math.isfinite(x) else None for x in values.tolist()] for key, values in per_bin.items()
        }
        profiles[name] = {"edges": [float(x) for x in edges], "count": [int(c) for c in count.tolist()], **columns}
    return profiles


def gap_sample(sums: Sums) -> dict[str, list[float]]:
    """Return both sides' log-probabilities of the tokens that `sample` drew, by the names of the record."""
    rows = sums["smallest:tokens"]
    _, rollout, old = rows[rows[:, 0].isfinite()].T.tolist()
    return {"rollout_logprobs": rollout, "old_logprobs": old}


class _Tokens:
    """The unmasked tokens of some rows, gathered once and widened to float64; everything below runs only over them."""

    def __init__(self, *, old: Tensor, rollout: Tensor, mask: Tensor, lengths: Tensor, first: int) -> None:
        places = mask.nonzero()[:, 0]
        before = torch.nn.functional.pad(mask.cumsum(0), (1, 0))
        ends = lengths.cumsum(0)
        counts = before[ends] - before[ends - lengths]
        self.rows = torch.arange(len(lengths), device=mask.device).repeat_interleave(counts)
        self.length = counts[counts > 0].double()
        self.present, self.size = counts > 0, len(lengths)
        self.old, self.rollout = old[places].double(), rollout[places].double()
        for name, values in (("old_logprobs", self.old), ("rollout_logprobs", self.rollout)):
            broken = (~values.isfinite()).nonzero()[:, 0]
            if len(broken):
                at, row = int(broken[0]), int(self.rows[broken[0]])
                position = int(places[at] - (ends - lengths)[row])
                raise non_finite(name, first + row, position, float(values[at]), len(broken), len(values))
        self.position = torch.arange(len(places), device=mask.device) - (counts.cumsum(0) - counts)[self.rows]
        self.d = self.old - self.rollout
        self.abs = self.d.abs()
        self.p, self.q = self.old.exp(), self.rollout.exp()
        self.p_abs = (self.p - self.q).abs()
        self.seq = self._per_row(self.d)
        # From d, because the difference of the two means would lose the digits of a tiny gap.
        self.diff = -self.seq / self.length

    @cached_property
    def k3(self) -> Tensor:
        """The k3 estimate of each token."""
        return k3(self.d)

    def tails(self) -> Sums:
        """Return counts of tokens and sequences, their largest values, and how many are beyond a threshold."""
        beyond = {f"f_{tau:g}": (self.abs > math.log(tau)).sum() for tau in TAUS}
        return _fetched(
            {
                "tokens": torch.ones_like(self.d).sum(),
                "saturated": (self.d > SATURATION).sum(),
                **beyond,
                "sequences": torch.ones_like(self.seq).sum(),
                "seq_saturated": (self.seq > SATURATION).sum(),
                "max:abs": _largest(self.abs),
                "max:p_abs": _largest(self.p_abs),
                "max:seq_abs": _largest(self.seq.abs()),
                "max:log_ppl_diff": _largest(self.diff),
                "max:-log_ppl_diff": _largest(-self.diff),
            }
        )

    def means(self) -> Sums:
        """Return the sums over tokens and over sequences that means are made from."""
        d, seq, diff = self.d, self.seq, self.diff
        # Where both sides are sure, both log-odds are the same bound.
        unsure = torch.minimum(self.old, self.rollout) < math.log1p(-SURE)
        old, rollout = (self._per_row(values) / self.length for values in (self.old, self.rollout))
        scalars = {
            "mean_tokens": torch.ones_like(d).sum(),
            "abs": self.abs.sum(),
            "d": d.sum(),
            "k3": self.k3.sum(),
            "log_odds_abs": (log_odds(self.old) - log_odds(self.rollout)).abs().sum(),
            "unsure": unsure.sum(),
            "r_squared": (2 * d.clamp(-CHI2_CUT, CHI2_CUT)).exp_().sum(),
            "p_abs": self.p_abs.sum(),
            "mean_sequences": torch.ones_like(seq).sum(),
            "seq": seq.sum(),
            "seq_abs": seq.abs().sum(),
            "seq_k3": k3(seq).sum(),
            "seq_r_squared": (2 * seq.clamp(-CHI2_CUT, CHI2_CUT)).exp().sum(),
            "old_ppl": (-old).clamp(max=SATURATION).exp().sum(),
            "rollout_ppl": (-rollout).clamp(max=SATURATION).exp().sum(),
            "old_log_ppl": -old.sum(),
            "rollout_log_ppl": -rollout.sum(),
            "log_ppl_diff": diff.sum(),
            "log_ppl_abs_diff": diff.abs().sum(),
            "ppl_ratio": diff.clamp(max=SATURATION).exp().sum(),
            "logsumexp:d": d.logsumexp(0),
            "logsumexp:2d": (2 * d).logsumexp(0),
            "logsumexp:seq": seq.logsumexp(0),
            "logsumexp:2seq": (2 * seq).logsumexp(0),
        }
        # In the order of `ROW_VARIABLES`.
        rows = torch.stack([self.length, self._per_row(self.abs), seq, self._per_row(self.k3)])
        pairs = torch.stack([self.p, self.q])
        return _fetched(scalars) | {"moments:p": moments(pairs).cpu(), "moments:rows": moments(rows).cpu()}

    def blocks(self) -> Sums:
        """Return the sums of k3 and of tokens by block of responses, for the median of means."""
        # A response's block comes from its own log-probabilities, so that batches and ranks may be cut in any way.
        fixed = (self.rollout.clamp(min=-1e6) * FIXED_POINT).round().long()
        of_row = fixed.new_zeros(self.size).index_add_(0, self.rows, fixed)
        mixed = (
            of_row * 0x9E3779B97F4A7C1 >> 24
        )  # multiplicative hashing (Knuth), whose middle bits depend on all lower ones
        block = mixed.remainder(BLOCKS)[self.rows].cpu()
        return {
            "block_k3": torch.bincount(block, weights=self.k3.cpu(), minlength=BLOCKS),
            "block_tokens": torch.bincount(block, minlength=BLOCKS).double(),
        }

    def profiles(self) -> Sums:
        """Return the sums of each bin; on the CPU, because on an accelerator deterministic algorithms refuse them."""
        sums: Sums = {}
        size, token_k3 = self.abs.cpu(), self.k3.cpu()
        for name, values in (("position", self.position.double()), ("probability", self.q)):
            edges = torch.tensor(PROFILES[name], dtype=torch.float64)
            bins, count = torch.bucketize(values.cpu(), edges[1:-1], right=True), len(edges) - 1
            sums[f"{name}/count"] = torch.bincount(bins, minlength=count).double()
            sums[f"{name}/abs"] = torch.bincount(bins, weights=size, minlength=count)
            sums[f"{name}/k3"] = torch.bincount(bins, weights=token_k3, minlength=count)
            nothing = torch.full((count,), -math.inf, dtype=torch.float64)
            sums[f"{name}/max:abs"] = nothing.scatter_reduce_(0, bins, size, "amax")
        return sums

    def sample(self, size: int, generator: torch.Generator) -> Sums:
        """Return the tokens with the smallest of random keys, which are a uniform sample, also after merging."""
        if not size:
            return {}
        keys = torch.rand(len(self.d), dtype=torch.float64, generator=generator)
        chosen = keys.topk(min(size, len(keys)), largest=False).indices
        where = chosen.to(self.d.device)
        rows = torch.stack([keys[chosen], self.rollout[where].cpu(), self.old[where].cpu()], dim=1)
        return {"smallest:tokens": torch.nn.functional.pad(rows, (0, 0, 0, size - len(rows)), value=math.inf)}

    def _per_row(self, values: Tensor) -> Tensor:
        return values.new_zeros(self.size).index_add_(0, self.rows, values)[self.present]


def _fetched(scalars: Mapping[str, Tensor]) -> Sums:
    """Return scalars as float64 on the CPU, by one transfer: on an accelerator each separate one would wait for the device."""
    values = torch.stack([value.double() for value in scalars.values()]).cpu()
    return dict(zip(scalars, values, strict=True))


def _robust_k3(sums: Tensor, counts: Tensor) -> dict[str, float]:
    """Return the median of means of k3, and its interval where enough blocks have a token."""
    middle, low, high = median_of_means(sums, counts)
    found = {"k3_median": middle, "k3_median_low": low, "k3_median_high": high}
    return {name: value for name, value in found.items() if value is not None}


def _largest(values: Tensor) -> Tensor:
    return values.max() if len(values) else values.new_tensor(-math.inf)


def _pearson(entry: Tensor) -> float:
    """Return the correlation; 1 where either side is constant up to the rounding of its mean."""
    count, _, _, pp, pq, _, qq = entry.tolist()
    if min(pp, qq) <= 1e-28 * count:
        return 1.0
    return float(max(-1.0, min(1.0, pq / math.sqrt(pp) / math.sqrt(qq))))


def _chunks(lengths: list[int]) -> Iterator[tuple[slice, slice]]:
    """Yield rows and their places: as many rows as fit `TOGETHER` places, but at least one; one empty chunk of no rows."""
    first = place = 0
    while True:
        last, places = first, 0
        while last < len(lengths) and (last == first or places + lengths[last] <= TOGETHER):
            places += lengths[last]
            last += 1
        yield slice(first, last), slice(place, place + places)
        first, place = last, place + places
        if first >= len(lengths):
            return
