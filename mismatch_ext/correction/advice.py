"""Advice on bounds that keep a given share of the sequences, from the gap of the two policies and the length of responses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from mismatch_ext.correction.settings import ResolvedCorrection
from mismatch_ext.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Advised bounds at one length, if the log-ratios of tokens are independent and normal.

    Args:
        sigma: Standard deviation of the log-ratio per token, nats.
        length: Tokens per response.
        keep: Share of sequences that the bounds below keep.
        sequence_bounds: Symmetric bounds (1/x, x) of the product of ratios.
        geometric_bounds: Symmetric bounds of the geometric mean of ratios.
        token_bounds: Symmetric bounds of a single ratio, which keep that share of tokens; from measured ratios if given.
        outside: Share of sequences (of tokens, for level `token`) beyond the given settings' bounds; None without settings.
        rejected: Share of sequences (of tokens, for `token_k1`) that each k1 rule of the given settings drops; k2 and k3
            rules are not judged.
        level: The level to use.
        reason: Why.
    """

    sigma: float
    length: float
    keep: float
    sequence_bounds: tuple[float, float]
    geometric_bounds: tuple[float, float]
    token_bounds: tuple[float, float]
    outside: float | None
    rejected: dict[str, float]
    level: str
    reason: str

    def __str__(self) -> str:
        lines = [
            f"sigma {self.sigma:.3g} nats per token, {self.length:g} tokens per response; bounds that keep {self.keep:.0%}:",
            f"  sequence   {_interval(self.sequence_bounds)} on the product of ratios",
            f"  geometric  {_interval(self.geometric_bounds)} on their geometric mean",
            f"  token      {_interval(self.token_bounds)} on each ratio (of tokens)",
        ]
        if self.outside is not None:
            lines.append(f"  the given bounds are exceeded by {self.outside:.1%}")
        lines += [f"  the given rule {name} drops {share:.1%}" for name, share in self.rejected.items()]
        return "\n".join([*lines, f"  advice: {self.level}: {self.reason}"])


def advise(
    *,
    sigma: float,
    length: float,
    mean: float = 0.0,
    settings: ResolvedCorrection | None = None,
    keep: float = 0.9,
    measured: Sequence[float] = (),
) -> Advice:
    """Say which thresholds keep a share of the sequences.

    Assumes that the log-ratios of a response's tokens are independent and normal: their sum is Normal(L mean, L sigma^2), their
    mean Normal(mean, sigma^2 / L). Real log-ratios have heavier tails, so fewer sequences are kept than this says. Because the
    sum's spread grows with sqrt(L), a bound on the product that is right at 100 tokens drops nearly everything at 10,000.

    Args:
        sigma: Standard deviation of log pi_old - log mu per token, nats; sqrt(2 k3_kl) of a run's metrics approximates it.
        length: Mean number of tokens per response.
        mean: Mean of the same difference (minus the metric `kl`), nats.
        settings: A correction whose bounds are to be judged.
        keep: Share of sequences to keep.
        measured: Differences of sampled tokens, nats. If given, the bounds of a single ratio are the quantile of these, not
            of a normal distribution, whose tail is too light for a quantised engine.

    Returns:
        Bounds per level, and the level to use.

    Raises:
        ConfigError: A number is out of range.
    """
    for name, ok, allowed in (
        ("sigma", 0 <= sigma < math.inf, "a number >= 0, in nats"),
        ("length", 1 <= length < math.inf, "a number >= 1"),
        ("mean", math.isfinite(mean), "a finite number"),
        ("keep", 0 < keep < 1, "0 < x < 1"),
        ("measured", all(map(math.isfinite, measured)), "finite numbers, in nats"),
    ):
        if not ok:
            raise ConfigError(f"advise: {name}={locals()[name]!r} is not allowed; allowed: {allowed}.")
    total, average = (length * mean, math.sqrt(length) * sigma), (mean, sigma / math.sqrt(length))
    bounds = {name: _bounds(*spread, keep) for name, spread in (("s", total), ("g", average), ("t", (mean, sigma)))}
    if measured:
        sizes = sorted(map(abs, measured))
        x = math.exp(min(sizes[math.ceil(keep * len(sizes)) - 1], 700.0))
        bounds["t"] = 1 / x, x
    spreads = {"sequence": total, "geometric": average, "token": (mean, sigma)}
    outside, rejected = None, {}
    if settings is not None:
        if settings.level != "none":
            outside = _outside(*spreads[settings.level], settings.lower, settings.upper)
        rejected = _rejected(settings, spreads)
    lost = max(outside or 0.0 if settings and settings.level == "sequence" else 0.0, rejected.get("seq_sum_k1", 0.0))
    level, reason = _choose(bounds["s"], length, keep, lost)
    return Advice(
        sigma=sigma,
        length=length,
        keep=keep,
        sequence_bounds=bounds["s"],
        geometric_bounds=bounds["g"],
        token_bounds=bounds["t"],
        outside=outside,
        rejected=rejected,
        level=level,
        reason=reason,
    )


def _rejected(settings: ResolvedCorrection, spreads: dict[str, tuple[float, float]]) -> dict[str, float]:
    """Return the share that each k1 rule drops."""
    level = {"token": "token", "sum": "sequence", "mean": "geometric"}
    shares = {}
    for rule in settings.rules:
        if rule.lower is not None:
            bounds = (rule.lower, rule.upper)
            if "verl_inverse_k1" in settings.compat:
                bounds = (1 / rule.upper, 1 / rule.lower)
            shares[rule.name] = _outside(*spreads[level[rule.over]], *bounds)
    return shares


def _choose(sequence: tuple[float, float], length: float, keep: float, lost: float) -> tuple[str, str]:
    """Choose the level: the sequence's weight is unbiased, but useful only while truncation at 2 changes few of the weights."""
    upper = sequence[1]
    if lost > 1 - keep and upper <= 10.0:
        return "token", (
            f"the given bounds of the product are exceeded by {lost:.1%} of the sequences, more than {1 - keep:.0%}; token "
            "weights are biased but keep every sequence."
        )
    if upper <= 2.0:
        return (
            "sequence",
            f"{keep:.0%} of the products lie within a factor of {upper:.2g}: the unbiased weight is affordable.",
        )
    if upper <= 10.0:
        return "token", (
            f"products spread over a factor of {upper:.2g} at {length:g} tokens; token weights are biased but keep every "
            "sequence."
        )
    return "geometric", (
        f"products spread over a factor of {upper:.2g} at {length:g} tokens, so that a sequence-level bound would drop or cut "
        "nearly everything; reject by the geometric mean, with token weights, and look for the cause of the gap."
    )


def _bounds(mean: float, spread: float, keep: float) -> tuple[float, float]:
    """Return the symmetric bounds (1/x, x) of exp(Normal(mean, spread^2)) that hold a share `keep`."""
    low, high = 0.0, abs(mean) + 40 * spread + 1e-12
    for _ in range(200):
        middle = (low + high) / 2
        inside = 1 - _outside(mean, spread, math.exp(-min(middle, 700)), math.exp(min(middle, 700)))
        low, high = (low, middle) if inside >= keep else (middle, high)
    x = math.exp(min(high, 700.0))
    return 1 / x, x


def _outside(mean: float, spread: float, lower: float | None, upper: float | None) -> float:
    """Return the probability that exp(Normal(mean, spread^2)) lies beyond the bounds."""
    low = -math.inf if lower is None else math.log(lower)
    high = math.inf if upper is None else math.log(upper)
    if spread == 0:
        return float(not low <= mean <= high)
    normal = NormalDist(mean, spread)
    below = 0.0 if low == -math.inf else normal.cdf(low)
    above = 0.0 if high == math.inf else 1 - normal.cdf(high)
    return below + above


def _interval(bounds: tuple[float, float]) -> str:
    return f"{bounds[0]:.4g} to {bounds[1]:.4g}"
