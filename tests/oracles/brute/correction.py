"""Importance weights and rejection token by token, from the formulas of `mismatch_ext.correct`'s docstring."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

CUT = 20.0


def weights_and_mask(
    rollout: Tensor, old: Tensor, mask: Tensor, settings: Any, advantages: Tensor, current: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the weight of each token, float64, and whether it is kept, both `[B, T]`; `settings` is a complete correction."""
    weights = torch.zeros(mask.shape, dtype=torch.float64)
    kept = torch.zeros(mask.shape, dtype=torch.bool)
    row_means = []
    for row in range(len(mask)):
        places = [(row, t) for t in range(mask.shape[1]) if mask[row, t]]
        if not places:
            continue
        log_ratios = [float(old[place]) - float(rollout[place]) for place in places]
        of_row = [weight(log_ratios, i, settings, float(old[places[i]])) for i in range(len(places))]
        row_means.append(sum(of_row) / len(of_row))
        row_rules = [rule for rule in settings.rules.items() if rule[0][:5] != "token"]
        keep_row = all(rule_keeps(log_ratios, name, bounds, settings.compat) for name, bounds in row_rules)
        if settings.veto is not None and min(log_ratios) < math.log(settings.veto):
            keep_row = False
        if settings.off_policy_threshold is not None:
            advantage = float(advantages[row]) if advantages.dim() == 1 else sum(float(advantages[p]) for p in places)
            policy = old if current is None else current
            drift = sum(float(rollout[place]) - float(policy[place]) for place in places) / len(places)
            if advantage < 0 and drift > settings.off_policy_threshold:
                keep_row = False
        token_rules = [rule for rule in settings.rules.items() if rule[0][:5] == "token"]
        for place, value, log_ratio in zip(places, of_row, log_ratios, strict=True):
            weights[place] = value
            kept[place] = keep_row and all(
                rule_keeps([log_ratio], name, bounds, settings.compat) for name, bounds in token_rules
            )
    if settings.normalize:
        mean = float(weights.sum() / mask.sum()) if settings.level == "token" else sum(row_means) / len(row_means)
        weights /= mean if mean > 1e-8 else 1.0
    return weights, kept


def weight(log_ratios: list[float], i: int, settings: Any, logprob: float) -> float:
    """Return the bounded weight of token i of a row, whose log-probability under the trainer's policy is given."""
    if settings.level == "none":
        return 1.0
    total = sum(log_ratios)
    exponent = {"token": log_ratios[i], "sequence": total, "geometric": total / len(log_ratios)}[settings.level]
    ratio = math.exp(cut(exponent))
    lower = 0.0 if settings.lower is None else settings.lower
    upper = math.inf if settings.upper is None else settings.upper
    if settings.confidence is not None:
        slope, floor = settings.confidence
        return float(min(ratio, 1 + slope * max(1 - math.exp(logprob), floor)))
    if settings.bound in ("truncate", "clip"):
        return min(max(ratio, lower), upper)
    return ratio if lower <= ratio <= upper else 0.0


def rule_keeps(log_ratios: list[float], name: str, bounds: tuple[float | None, float], compat: frozenset[str]) -> bool:
    """Return whether a rule keeps these tokens, which are a row or a single token."""
    *_, over, estimator = name.split("_")
    values = [{"k1": -x, "k2": x * x / 2, "k3": math.expm1(x) - x}[estimator] for x in (cut(x) for x in log_ratios)]
    value = {"token": values[0], "sum": sum(values), "mean": sum(values) / len(values), "max": max(values)}[over]
    lower, upper = bounds
    if lower is None:
        return bool(value <= upper)
    low, high = -math.log(upper), -math.log(lower)
    if "verl_inverse_k1" in compat:
        low, high = math.log(lower), math.log(upper)
    return low <= value <= high


def cut(log_ratio: float) -> float:
    return max(-CUT, min(CUT, log_ratio))
