"""The metrics of a correction, with the same names in every host, and their combination over ranks.

If a host has a setting of its own for the correction that is asked for, it applies its own weights and logs its own names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from torch import Tensor

from mismatch_ext.presets import ResolvedCorrection
from mismatch_ext.ranks import Ranks

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


def of_weights(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return a correction's metrics of weights and rejection, without those of the gap, which is measured anyway.

    Args:
        metrics: Metrics from `correct`.
    """
    own = ("rollout_is_", "rollout_rs_", "off_policy_")
    return {name: value for name, value in metrics.items() if name.startswith(own)}


def over_ranks(
    metrics: Mapping[str, float], mask: Tensor, settings: ResolvedCorrection, ranks: Ranks
) -> dict[str, float]:
    """Return the metrics of `LOGGED` over all ranks' tokens, by one collective call in which every rank must take part.

    Args:
        metrics: Metrics from `correct` on this rank; empty if it has no token.
        mask: 1 for this rank's tokens that are trained on `[B, T]`.
        settings: The correction, the same on all ranks.
        ranks: The processes.
    """
    chosen = mask.bool()
    mine = {name: metrics[name] for name in LOGGED if name in metrics}
    parts = ranks.gather((float(chosen.sum()), float(chosen.any(-1).sum()), mine))
    merged: dict[str, float] = {}

    def mean(values: list[tuple[float, float]]) -> float:
        return sum(weight * value for weight, value in values) / sum(weight for weight, _ in values)

    for name, over in LOGGED.items():
        known = [(tokens, sequences, found[name]) for tokens, sequences, found in parts if name in found]
        if not known:
            continue
        if over in ("max", "min"):
            merged[name] = (max if over == "max" else min)(value for _, _, value in known)
        elif over != "moments":
            by_sequence = over == "sequences" or (over == "weights" and settings.level != "token")
            merged[name] = mean([(sequences if by_sequence else tokens, value) for tokens, sequences, value in known])
    if settings.level != "none" and "rollout_is_mean" in merged:
        # These follow from the variance over all tokens, because means of the ranks' values would be wrong.
        first = merged["rollout_is_mean"]
        spread = [(n, f["rollout_is_std"] ** 2 + (f["rollout_is_mean"] - first) ** 2) for n, _, f in parts if f]
        variance = mean(spread)
        merged["rollout_is_std"] = variance**0.5
        merged["rollout_is_eff_sample_size"] = first * first / (variance + first * first) if variance + first else 0.0
    return merged
