"""What is logged of a correction, under the same names in every host, and how the figures of ranks become those of the batch.

Where a host applies weights of its own, because it has a setting for what is asked, it logs them under its own names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from torch import Tensor

from mismatch_ext.correction.settings import ResolvedCorrection
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
    "rollout_is_batch_norm_factor": "tokens",
    "rollout_is_veto_fraction": "sequences",
    "rollout_rs_masked_fraction": "tokens",
    "rollout_rs_seq_masked_fraction": "sequences",
}
"""What every host logs of weights and rejection, without prefix, and what each figure is a mean over: `weights` are tokens, or
sequences where a weight is a sequence's. Others are the largest or smallest of the ranks', or follow from their moments."""


def of_weights(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return what a correction says of its weights and its rejection, without the gap, which is measured anyway.

    Args:
        metrics: Those of `correct`.
    """
    own = ("rollout_is_", "rollout_rs_", "off_policy_")
    return {name: value for name, value in metrics.items() if name.startswith(own)}


def over_ranks(
    metrics: Mapping[str, float], mask: Tensor, settings: ResolvedCorrection, ranks: Ranks
) -> dict[str, float]:
    """Return the figures of `LOGGED` over all ranks' tokens, in one collective call that every rank takes part in.

    Args:
        metrics: Those of `correct` on this rank; none where it has no token.
        mask: 1 for tokens that are trained on, this rank's `[B, T]`.
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
        # From the second moment over all tokens: spreads and sample sizes of ranks do not average.
        squares = mean([(n, f["rollout_is_mean"] ** 2 + f["rollout_is_std"] ** 2) for n, _, f in parts if f])
        first = merged["rollout_is_mean"]
        merged["rollout_is_std"] = max(squares - first * first, 0.0) ** 0.5
        merged["rollout_is_eff_sample_size"] = first * first / squares if squares > 0 else 0.0
    return merged
