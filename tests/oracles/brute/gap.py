"""The gap's metrics from lists of numbers, by the formulas of mismatch_ext/names.toml."""

from __future__ import annotations

import math

Token = tuple[float, float]
"""The trainer's and the engine's log-probability."""


def metrics(rows: list[list[Token]]) -> dict[str, float]:
    """Return the metrics of rows of tokens, at least one of which has a token."""
    rows = [row for row in rows if row]
    tokens = [token for row in rows for token in row]
    d = [old - rollout for old, rollout in tokens]
    totals = [math.fsum(old - rollout for old, rollout in row) for row in rows]
    old_means = [mean([old for old, _ in row]) for row in rows]
    rollout_means = [mean([rollout for _, rollout in row]) for row in rows]
    log_ppl_diff = [-total / len(row) for total, row in zip(totals, rows, strict=True)]
    p, q = [math.exp(old) for old, _ in tokens], [math.exp(rollout) for _, rollout in tokens]
    p_diff = [abs(x - y) for x, y in zip(p, q, strict=True)]
    return {
        "tokens": len(tokens),
        "sequences": len(rows),
        "logp_abs_diff_mean": mean([abs(x) for x in d]),
        "logp_abs_diff_max": max(abs(x) for x in d),
        "kl": -mean(d),
        "k3_kl": mean([k3(x) for x in d]),
        "seq_kl": -mean(totals),
        "seq_k3_kl": mean([k3(x) for x in totals]),
        "seq_logp_abs_diff_mean": mean([abs(x) for x in totals]),
        "seq_logp_abs_diff_max": max(abs(x) for x in totals),
        "f_1.1": mean([float(abs(x) > math.log(1.1)) for x in d]),
        "f_2": mean([float(abs(x) > math.log(2)) for x in d]),
        "ess_token": effective_sample_size(d),
        "ess_seq": effective_sample_size(totals),
        "chi2_token": mean([math.exp(2 * max(-20, min(20, x))) for x in d]) - 1,
        "chi2_seq": mean([math.exp(2 * max(-20, min(20, x))) for x in totals]) - 1,
        "training_ppl": mean([math.exp(-x) for x in old_means]),
        "rollout_ppl": mean([math.exp(-x) for x in rollout_means]),
        "training_log_ppl": -mean(old_means),
        "rollout_log_ppl": -mean(rollout_means),
        "log_ppl_diff": mean(log_ppl_diff),
        "log_ppl_abs_diff": mean([abs(x) for x in log_ppl_diff]),
        "log_ppl_diff_max": max(log_ppl_diff),
        "log_ppl_diff_min": min(log_ppl_diff),
        "ppl_ratio": mean([math.exp(x) for x in log_ppl_diff]),
        "rollout_probs_diff_mean": mean(p_diff),
        "rollout_probs_diff_max": max(p_diff),
        "rollout_probs_pearson": pearson(p, q),
    }


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def k3(d: float) -> float:
    return math.expm1(d) - d if abs(d) > 1e-5 else d**2 / 2 + d**3 / 6


def effective_sample_size(log_weights: list[float]) -> float:
    """Return (sum of weights)^2 / (n * sum of squared weights)."""
    largest = max(log_weights)
    weights = [math.exp(x - largest) for x in log_weights]
    return math.fsum(weights) ** 2 / math.fsum(w * w for w in weights) / len(weights)


def pearson(p: list[float], q: list[float]) -> float:
    """Return the correlation; 1 where one side is constant up to rounding."""
    p_mean, q_mean = mean(p), mean(q)
    pp, qq = math.fsum((x - p_mean) ** 2 for x in p), math.fsum((y - q_mean) ** 2 for y in q)
    if min(pp, qq) <= 1e-28 * len(p):
        return 1.0
    return math.fsum((x - p_mean) * (y - q_mean) for x, y in zip(p, q, strict=True)) / math.sqrt(pp) / math.sqrt(qq)
