"""All mismatch measures in one pass over each batch, mergeable across batches and ranks.

Shapes: B sequences, T tokens, n unmasked tokens, m sequences that have one.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from mismatch_ext.errors import NonFiniteLogprobError, RecordError
from mismatch_ext.metrics.moments import Moments
from mismatch_ext.metrics.names import tail_name
from mismatch_ext.metrics.numerics import SATURATION, as_bool, k3
from mismatch_ext.metrics.profiles import POSITION_EDGES, PROBABILITY_EDGES, Histogram, Profile
from mismatch_ext.rollout import SamplingSettings

STATE_VERSION = 2
# verl cuts log-ratios here before squaring them, so chi-square means the same in both.
CHI2_CUT = 20.0
SUMS = (
    "tokens", "abs", "d", "k3", "saturated", "r_squared", "p_abs",
    "sequences", "seq_abs", "seq", "seq_k3", "seq_saturated", "seq_r_squared", "old_ppl", "rollout_ppl", "old_log_ppl",
    "rollout_log_ppl", "log_ppl_diff", "log_ppl_abs_diff", "ppl_ratio",
)  # fmt: skip
MAXIMA = ("abs_max", "p_abs_max", "seq_abs_max", "log_ppl_diff_max", "log_ppl_diff_min_negated")
TAUS = (1.1, 2.0)
"""Thresholds of F(tau), the fraction of tokens whose ratio of probabilities, or its inverse, exceeds tau."""
LOG_SUMS = ("lse", "lse_squared", "seq_lse", "seq_lse_squared")


@dataclass(frozen=True, kw_only=True)
class MismatchSummary:
    """The measures of all batches that were added.

    Args:
        scalars: Measures by name, see `mismatch_ext.metrics.names`.
        profiles: The profiles "position" and "probability".
        scatter: Both sides' log-probabilities of a uniform sample of tokens, or None when no sample was asked for.
    """

    scalars: dict[str, float]
    profiles: dict[str, Profile]
    scatter: dict[str, list[float]] | None


class MismatchAccumulator:
    """Accumulates the gap between trainer and rollout log-probabilities of the sampled tokens.

    Args:
        sampling: Settings that the tokens were sampled with, for `support_truncated`.
        scatter_samples: Number of tokens kept for a scatter plot.
        seed: Seed of the random choice of those tokens.
    """

    def __init__(
        self,
        *,
        sampling: SamplingSettings | None = None,
        scatter_samples: int = 0,
        seed: int = 0,
    ) -> None:
        if scatter_samples < 0:
            raise RecordError(f"scatter_samples={scatter_samples} must be >= 0; 0 keeps no sample.")
        self.sampling = sampling
        self.scatter_samples = scatter_samples
        self._generator = torch.Generator().manual_seed(seed)
        self._sums = dict.fromkeys((*SUMS, *map(tail_name, TAUS)), 0.0)
        self._maxima = dict.fromkeys(MAXIMA, -math.inf)
        self._log_sums = dict.fromkeys(LOG_SUMS, -math.inf)
        self._moments = Moments()
        self._histograms = {"position": Histogram(POSITION_EDGES), "probability": Histogram(PROBABILITY_EDGES)}
        # Rows: sort key, rollout log-prob, old log-prob. The smallest keys are a uniform sample, also after merging.
        self._sample = torch.empty(0, 3, dtype=torch.float64)

    def update(
        self, old_logprobs: Tensor, rollout_logprobs: Tensor, response_mask: Tensor, chosen: Tensor | None = None
    ) -> None:
        """Add a batch.

        Args:
            old_logprobs: Trainer's log-probabilities at sampling time `[B, T]`, any float dtype.
            rollout_logprobs: Engine's log-probabilities `[B, T]`, any float dtype.
            response_mask: True, or 1, at the policy's own tokens `[B, T]`. The other places are not read.
            chosen: True, or 1, at those of the policy's own tokens that count `[B, T]`; None counts all. A token's position in
                the profile is its number among all of the policy's own tokens of the row; tokens of tools are not numbered.

        Raises:
            RecordError: Shapes differ, or a tensor has a wrong dtype.
            NonFiniteLogprobError: A counted value is NaN or infinite; the message names tensor, row, position and value.
        """
        mask = _checked_mask(old_logprobs, rollout_logprobs, response_mask)
        picked = mask if chosen is None else mask & _checked_chosen(chosen, mask)
        # The tokens that count are selected once; everything below runs only over them.
        places = picked.flatten().nonzero()[:, 0]
        if not len(places):
            return
        rows, columns = places // mask.shape[1], places % mask.shape[1]
        old, rollout = (x.detach().flatten()[places].double() for x in (old_logprobs, rollout_logprobs))
        self._add_places(old, rollout, rows, columns, mask.shape[0], (mask.cumsum(1) - 1).flatten()[places])

    def update_rows(
        self,
        old_logprobs: Tensor,
        rollout_logprobs: Tensor,
        response_mask: Tensor,
        lengths: Tensor,
        chosen: Tensor | None = None,
    ) -> None:
        """Add a batch whose rows are concatenated without padding: R places in total.

        Args:
            old_logprobs: Trainer's log-probabilities `[R]`, any float dtype.
            rollout_logprobs: Engine's log-probabilities `[R]`, any float dtype.
            response_mask: True, or 1, at the policy's own tokens `[R]`.
            lengths: Places of each row `[B]`, whole numbers that add up to R, on the tensors' device.
            chosen: As for `update`, `[R]`.

        Raises:
            RecordError, NonFiniteLogprobError: As `update`.
        """
        mask = _checked_mask(old_logprobs, rollout_logprobs, response_mask, dims=1)
        picked = mask if chosen is None else mask & _checked_chosen(chosen, mask)
        if lengths.dim() != 1 or int(lengths.sum()) != len(mask):
            raise RecordError(
                f"lengths {list(lengths.shape)} add up to {int(lengths.sum())}, and there are {len(mask)} places in the rows."
            )
        places = picked.nonzero()[:, 0]
        if not len(places):
            return
        ends = lengths.cumsum(0)
        starts, rows = ends - lengths, torch.searchsorted(ends, places, right=True)
        before = torch.nn.functional.pad(mask.cumsum(0), (1, 0))  # the policy's own tokens before each place
        old, rollout = (x.detach()[places].double() for x in (old_logprobs, rollout_logprobs))
        own = before[places] - before[starts[rows]]
        self._add_places(old, rollout, rows, places - starts[rows], len(lengths), own)

    def _add_places(
        self, old: Tensor, rollout: Tensor, rows: Tensor, columns: Tensor, batch: int, positions: Tensor
    ) -> None:
        for name, values in (("old_logprobs", old), ("rollout_logprobs", rollout)):
            _require_finite(name, values, rows, columns)
        d = old - rollout
        size, token_k3, rollout_p = d.abs(), k3(d), rollout.exp()
        self._add_tokens(d, size, token_k3, old.exp(), rollout_p)
        self._add_sequences(d, old, rollout, rows, batch)
        self._histograms["position"].update(positions.double(), size, token_k3)
        self._histograms["probability"].update(rollout_p, size, token_k3)
        if self.scatter_samples:
            keys = torch.rand(len(d), dtype=torch.float64, generator=self._generator)
            self._keep_sample(torch.stack([keys, rollout.cpu(), old.cpu()], dim=1))

    def _add_tokens(self, d: Tensor, size: Tensor, token_k3: Tensor, p: Tensor, q: Tensor) -> None:
        p_abs = (p - q).abs()
        self._add(
            tokens=torch.tensor(len(d)), abs=size.sum(), d=d.sum(), k3=token_k3.sum(),
            saturated=(d > SATURATION).sum(), r_squared=(2 * d.clamp(-CHI2_CUT, CHI2_CUT)).exp_().sum(),
            p_abs=p_abs.sum(),
            **{tail_name(tau): (size > math.log(tau)).sum() for tau in TAUS},
        )  # fmt: skip
        self._raise_maxima(abs_max=size, p_abs_max=p_abs)
        self._moments += Moments.of(p, q)
        self._log_add(lse=d, lse_squared=2 * d)

    def _add_sequences(self, d: Tensor, old: Tensor, rollout: Tensor, rows: Tensor, batch: int) -> None:
        def per_row(values: Tensor) -> Tensor:
            return torch.zeros(batch, dtype=torch.float64, device=d.device).index_add_(0, rows, values)

        length = per_row(torch.ones_like(d))
        present = length > 0
        length = length[present]
        total, mean_old, mean_rollout = (per_row(x)[present] for x in (d, old, rollout))
        mean_old, mean_rollout = mean_old / length, mean_rollout / length
        # Computed from d, because the difference of the two means would lose the digits of a tiny gap.
        diff = -total / length
        self._add(
            sequences=torch.tensor(len(total)), seq_abs=total.abs().sum(), seq=total.sum(), seq_k3=k3(total).sum(),
            seq_saturated=(total > SATURATION).sum(), seq_r_squared=(2 * total.clamp(-CHI2_CUT, CHI2_CUT)).exp().sum(),
            old_ppl=(-mean_old).clamp(max=SATURATION).exp().sum(),
            rollout_ppl=(-mean_rollout).clamp(max=SATURATION).exp().sum(),
            old_log_ppl=-mean_old.sum(), rollout_log_ppl=-mean_rollout.sum(),
            log_ppl_diff=diff.sum(), log_ppl_abs_diff=diff.abs().sum(), ppl_ratio=diff.clamp(max=SATURATION).exp().sum(),
        )  # fmt: skip
        self._raise_maxima(seq_abs_max=total.abs(), log_ppl_diff_max=diff, log_ppl_diff_min_negated=-diff)
        self._log_add(seq_lse=total, seq_lse_squared=2 * total)

    def _add(self, **sums: Tensor) -> None:
        # One transfer for all sums, because on an accelerator each separate read-out would wait for the device.
        device = next(reversed(sums.values())).device
        for name, total in zip(sums, torch.stack([v.double().to(device) for v in sums.values()]).tolist(), strict=True):
            self._sums[name] += total

    def _raise_maxima(self, **values: Tensor) -> None:
        for name, value in values.items():
            self._maxima[name] = max(self._maxima[name], float(value.max()))

    def _log_add(self, **values: Tensor) -> None:
        for name, value in values.items():
            self._log_sums[name] = _log_add_exp(self._log_sums[name], float(torch.logsumexp(value, 0)))

    def _keep_sample(self, rows: Tensor) -> None:
        rows = torch.cat([self._sample, rows])
        self._sample = rows[rows[:, 0].argsort()[: self.scatter_samples]]

    @property
    def is_empty(self) -> bool:
        """Whether no unmasked token was added yet."""
        return not self._sums["tokens"]

    @property
    def tokens(self) -> int:
        """Number of unmasked tokens that were added."""
        return int(self._sums["tokens"])

    def merge(self, other: MismatchAccumulator) -> None:
        """Add another accumulator's measures, as if its batches had been added to this one."""
        for name, value in other._sums.items():
            self._sums[name] += value
        for name, value in other._maxima.items():
            self._maxima[name] = max(self._maxima[name], value)
        for name, value in other._log_sums.items():
            self._log_sums[name] = _log_add_exp(self._log_sums[name], value)
        self._moments += other._moments
        for name, histogram in other._histograms.items():
            self._histograms[name].merge(histogram)
        self._keep_sample(other._sample)

    def state_dict(self) -> dict[str, Any]:
        """Return the accumulator's state as plain JSON-able data, with None for infinities."""
        return {
            "version": STATE_VERSION,
            "sums": dict(self._sums),
            "maxima": {k: None if math.isinf(v) else v for k, v in self._maxima.items()},
            "log_sums": {k: None if math.isinf(v) else v for k, v in self._log_sums.items()},
            "moments": asdict(self._moments),
            "histograms": {name: histogram.state_dict() for name, histogram in self._histograms.items()},
            "sample": self._sample.tolist(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            RecordError: The state is of another version.
        """
        if state.get("version") != STATE_VERSION:
            raise RecordError(
                f"accumulator state of version {state.get('version')!r}; this release reads {STATE_VERSION}."
            )
        self._sums = dict(state["sums"])
        self._maxima = {k: -math.inf if v is None else v for k, v in state["maxima"].items()}
        self._log_sums = {k: -math.inf if v is None else v for k, v in state["log_sums"].items()}
        self._moments = Moments(**state["moments"])
        for name, histogram in state["histograms"].items():
            self._histograms[name].load_state_dict(histogram)
        self._sample = torch.tensor(state["sample"], dtype=torch.float64).reshape(-1, 3)

    def compute(self) -> MismatchSummary:
        """Return the measures of everything added so far.

        Raises:
            RecordError: No unmasked token was added.
        """
        if self.is_empty:
            raise RecordError("no unmasked tokens were measured; there is nothing to report.")
        scatter = None
        if self.scatter_samples:
            _, rollout, old = self._sample.T.tolist()
            scatter = {"rollout_logprobs": rollout, "old_logprobs": old}
        profiles = {name: histogram.profile() for name, histogram in self._histograms.items()}
        return MismatchSummary(scalars=self._scalars(), profiles=profiles, scatter=scatter)

    def _scalars(self) -> dict[str, float]:
        s, top, n, m = self._sums, self._maxima, self._sums["tokens"], self._sums["sequences"]
        logs = self._log_sums
        return {
            "tokens": n,
            "sequences": m,
            "logp_abs_diff_mean": s["abs"] / n,
            "logp_abs_diff_max": top["abs_max"],
            "kl": -s["d"] / n,
            "k3_kl": s["k3"] / n,
            "k3_saturated_frac": s["saturated"] / n,
            "seq_k3_saturated_frac": s["seq_saturated"] / m,
            "seq_kl": -s["seq"] / m,
            "seq_k3_kl": s["seq_k3"] / m,
            "seq_logp_abs_diff_mean": s["seq_abs"] / m,
            "seq_logp_abs_diff_max": top["seq_abs_max"],
            **{tail_name(tau): s[tail_name(tau)] / n for tau in TAUS},
            "ess_token": math.exp(2 * logs["lse"] - logs["lse_squared"]) / n,
            "ess_seq": math.exp(2 * logs["seq_lse"] - logs["seq_lse_squared"]) / m,
            "chi2_token": s["r_squared"] / n - 1,
            "chi2_seq": s["seq_r_squared"] / m - 1,
            "training_ppl": s["old_ppl"] / m,
            "training_log_ppl": s["old_log_ppl"] / m,
            "rollout_ppl": s["rollout_ppl"] / m,
            "rollout_log_ppl": s["rollout_log_ppl"] / m,
            "log_ppl_diff": s["log_ppl_diff"] / m,
            "log_ppl_abs_diff": s["log_ppl_abs_diff"] / m,
            "log_ppl_diff_max": top["log_ppl_diff_max"],
            "log_ppl_diff_min": -top["log_ppl_diff_min_negated"],
            "ppl_ratio": s["ppl_ratio"] / m,
            "rollout_probs_diff_mean": s["p_abs"] / n,
            "rollout_probs_diff_max": top["p_abs_max"],
            "rollout_probs_pearson": self._moments.pearson,
            "support_truncated": float(self.sampling is not None and self.sampling.truncates_support),
        }


def mismatch_metrics(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    response_mask: Tensor,
    *,
    sampling: SamplingSettings | None = None,
) -> dict[str, float]:
    """Return every scalar measure of one batch; arguments and errors as in `MismatchAccumulator.update`."""
    accumulator = MismatchAccumulator(sampling=sampling)
    accumulator.update(old_logprobs, rollout_logprobs, response_mask)
    return accumulator.compute().scalars


def _log_add_exp(a: float, b: float) -> float:
    high, low = max(a, b), min(a, b)
    return high if math.isinf(low) else high + math.log1p(math.exp(low - high))


def _checked_mask(old: Tensor, rollout: Tensor, mask: Tensor, dims: int = 2) -> Tensor:
    shapes = {"old_logprobs": old, "rollout_logprobs": rollout, "response_mask": mask}
    if len({tuple(t.shape) for t in shapes.values()}) != 1 or mask.dim() != dims:
        listed = ", ".join(f"{name} {list(t.shape)}" for name, t in shapes.items())
        raise RecordError(f"{listed}: the three must have one shape {'[B, T]' if dims == 2 else '[R]'}.")
    for name, tensor in (("old_logprobs", old), ("rollout_logprobs", rollout)):
        if not tensor.is_floating_point():
            raise RecordError(f"{name} has dtype {tensor.dtype}; log-probabilities must be floating point.")
    return as_bool("response_mask", mask)


def _checked_chosen(chosen: Tensor, mask: Tensor) -> Tensor:
    if chosen.shape != mask.shape:
        raise RecordError(f"chosen {list(chosen.shape)} does not fit response_mask {list(mask.shape)}.")
    return as_bool("chosen", chosen)


def _require_finite(name: str, values: Tensor, rows: Tensor, positions: Tensor) -> None:
    broken = ~torch.isfinite(values)
    if broken.any():
        first = int(broken.nonzero()[0])
        raise NonFiniteLogprobError(
            f"{name}[{int(rows[first])}, {int(positions[first])}] (row, position) is {float(values[first])}, and "
            f"{int(broken.sum())} of {len(values)} unmasked values are not finite. An overflow in float16 or broken "
            "weights cause this; a position without a log-probability must be masked."
        )
