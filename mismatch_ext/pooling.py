"""Figures of a whole run, pooled over the logs of a split.

Means of steps are weighted by the number of tokens (or sequences) that each step measured, if the log has it, so that the result
is the mean over all tokens. A maximum is taken over all steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mismatch_ext.alarms import STALENESS
from mismatch_ext.log_reading import RunData
from mismatch_ext.names import PARTS_OF_CACHE, PARTS_OF_STALE, PREFIX

Floats = NDArray[np.float64]

NATIVE = "native/"
NUMERICS = "numerics/"
KINDS = (NATIVE, *PARTS_OF_STALE, *PARTS_OF_CACHE)
"""Prefixes of figures over other tokens, or from another pass, than the gap; each prefix has its own count of tokens."""
ROUTING_WEIGHT = "routing/compared_tokens"
WEIGHTS = {
    "seq_kl": "sequences",
    "seq_k3_kl": "sequences",
    "masked_seq_frac": "sequences",
    "ess_token": None,
    "ess_seq": None,
}
"""Metric -> the count that weights it; tokens by default. None means a plain mean over steps: ESS describes one batch."""

ABS_DIFF_MEAN = "logp_abs_diff_mean"
ABS_DIFF_MAX = "logp_abs_diff_max"
MAXIMA = (ABS_DIFF_MAX,)


def nonfinite(run: RunData, split: str, *names: str) -> int:
    """Return how many logs of a split have NaN or infinity in a mismatch metric, or in one of these metrics."""
    table = run.tables[split]
    broken = np.zeros(len(table.steps), bool)
    for name, column in table.columns.items():
        if name.startswith(PREFIX) or name in names:
            broken |= column.broken
    return int(broken.sum())


def pooled(run: RunData, column: str, split: str = "train") -> float | None:
    """Pool one metric over the steps of a split: the maximum, or the mean weighted by tokens or sequences."""
    measured = run.column(PREFIX + column, split)
    if measured is None or not measured.finite.any():
        return None
    values = measured.values[measured.finite]
    if column.removeprefix(NATIVE) in MAXIMA:
        return float(values.max())
    weight = weight_of(column)
    counted = run.column(weight, split) if weight else None
    return _weighted_mean(values, None if counted is None else counted.values[measured.finite])


def _weighted_mean(values: Floats, weights: Floats | None) -> float | None:
    """Return the mean of the values that have a weight, or the plain mean if none has; None if it is not finite."""
    known = np.zeros(len(values), bool) if weights is None else weights > 0
    with np.errstate(over="ignore", invalid="ignore"):
        if weights is None or not known.any():
            mean = values.sum() / len(values)
        else:
            mean = (values[known] * weights[known]).sum() / weights[known].sum()
    return float(mean) if np.isfinite(mean) else None


def replay_k3(run: RunData, split: str = "train") -> tuple[float, float] | None:
    """Return k3 without and with routing replay over the logs of a split that have both; None if no log has both."""
    native = run.column(f"{PREFIX}{NATIVE}k3_kl", split)
    replayed = run.column(f"{PREFIX}k3_kl", split)
    if native is None or replayed is None:
        return None
    both = native.finite & replayed.finite
    if not both.any():
        return None
    # Both get one weight, because a log may pool more batches than were scored without replay.
    tokens = run.column(f"{PREFIX}{NATIVE}tokens", split)
    weights = None if tokens is None else tokens.values[both]
    without = _weighted_mean(native.values[both], weights)
    with_replay = _weighted_mean(replayed.values[both], weights)
    return None if without is None or with_replay is None else (without, with_replay)


def weight_of(column: str) -> str | None:
    """Return the metric that weights the steps in the mean of a metric, given without "mismatch/"; None for a plain mean."""
    kind = next((kind for kind in KINDS if column.startswith(kind)), "")
    plain = column.removeprefix(kind)
    count_name = WEIGHTS.get(plain, ROUTING_WEIGHT if plain.startswith("routing/") else "tokens")
    if count_name and plain != column:
        count_name = kind + count_name
    return f"{PREFIX}{count_name}" if count_name else None


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of a run's gap, nats, pooled over its steps; version v of the weights sampled, version w is trained."""

    numerics: float | None  # mean |rollout(v) - train(v)|, both sides at one version; None if no step could measure it
    k3: float | None  # of the same tokens
    total: float | None  # mean |rollout(v) - train(w)| of all tokens


def parts(run: RunData) -> Parts | None:
    """Return the parts of a run's gap; None if its rollouts always come from the weights that score them."""
    if not run.series(STALENESS)[0]:
        return None
    return Parts(
        numerics=pooled(run, NUMERICS + ABS_DIFF_MEAN),
        k3=pooled(run, NUMERICS + "k3_kl"),
        total=pooled(run, ABS_DIFF_MEAN),
    )
