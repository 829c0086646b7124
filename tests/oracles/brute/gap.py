"""The gap's metrics from lists of numbers, by the formulas of mismatch_ext/names.toml."""

from __future__ import annotations

import math
from statistics import median

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
        "k3_median": median(means_of_blocks(rows)),
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


def means_of_blocks(rows: list[list[Token]]) -> list[float]:
    """Return the mean k3 of each of 16 blocks of rows that has one."""
    blocks: dict[int, list[float]] = {}
    for row in rows:
        # As 64-bit integers multiply: the sum of the engine's log-probabilities in parts of a nat, hashed.
        total = sum(round(rollout * 2**20) for _, rollout in row) * 0x9E3779B97F4A7C1 % 2**64
        signed = total - 2**64 if total >= 2**63 else total
        blocks.setdefault((signed >> 24) % 16, []).extend(k3(old - rollout) for old, rollout in row)
    return [mean(values) for values in blocks.values()]


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
