"""The numbers of the report: one row per run and split, and ratios between runs.

Each number is pooled over all recorded steps of a split. Means of steps are weighted by the number of tokens (or sequences) that
each step measured, if the stream records it, so that the result is the mean over all tokens. A maximum is taken over all steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mismatch_ext.alarms import STALENESS
from mismatch_ext.gap import TAUS
from mismatch_ext.host_logs import read_runs
from mismatch_ext.log_reading import RUN_FOLDER, RunData
from mismatch_ext.names import PARTS_OF_STALE, PREFIX, Role

NATIVE = "native/"
NUMERICS = "numerics/"
KINDS = (NATIVE, *PARTS_OF_STALE)
"""Prefixes of figures over other tokens, or from another pass, than the gap; each prefix has its own count of tokens."""
# Metric -> the count that weights it; tokens by default. None means a plain mean over steps: ESS describes one batch.
ROUTING_WEIGHT = "routing/compared_tokens"
WEIGHTS = {
    "seq_kl": "sequences", "seq_k3_kl": "sequences", "masked_seq_frac": "sequences", "ess_token": None, "ess_seq": None,
}  # fmt: skip

ABS_DIFF_MEAN = "logp_abs_diff_mean"
ABS_DIFF_MAX = "logp_abs_diff_max"
MAXIMA = (ABS_DIFF_MAX,)
TAILS = tuple(f"f_{tau:g}" for tau in TAUS)
COLUMNS = (
    *(ABS_DIFF_MEAN, ABS_DIFF_MAX, "kl", "k3_kl", "seq_kl", "seq_k3_kl", *TAILS, "ess_token", "ess_seq"),
    *("masked_token_frac", "masked_seq_frac"),
)
STALE_COLUMNS = ("numerics/" + ABS_DIFF_MEAN, "numerics/k3_kl")
"""Columns of runs whose rollouts may have been sampled with older weights."""
FLIPS = "routing/set_mismatch_frac"
REPLAY_COLUMNS = (FLIPS, NATIVE + "k3_kl")
"""Columns of runs that replay routes."""
# Number of steps averaged at either end for "reward first -> last"; fewer if a run is shorter than twice this.
REWARD_WINDOW = 5


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run and split: `values` by metric name without prefix; None if nothing finite was recorded.

    `logs` counts the logs, of which a trainer may write fewer than it takes steps.
    """

    run: str
    split: str
    logs: int
    values: dict[str, float | None]
    reward_first: float | None = None
    reward_last: float | None = None
    nonfinite_steps: int = 0


@dataclass(frozen=True, kw_only=True)
class Summary:
    """All rows; `columns` lists the metrics that at least one row has."""

    rows: tuple[Row, ...]
    columns: tuple[str, ...] = field(default=COLUMNS)

    @property
    def runs(self) -> set[str]:
        """Names of the runs that have rows."""
        return {row.run for row in self.rows}

    def row(self, run: str, split: str = "train") -> Row | None:
        """Return the row of a run and split, or None."""
        return next((row for row in self.rows if row.run == run and row.split == split), None)


def load_runs(directory: str | Path) -> dict[str, RunData]:
    """Read every run at a path, ours or a log of TRL or verl, by the name the report shows; raises RunDirectoryError.

    The name is the one in the run's header; or the folder's, if the header has none, has its path, or two runs share it.
    """
    data = read_runs(directory)
    names = {folder: _header_name(run) or folder for folder, run in data.items()}
    taken = list(names.values())
    labels = {f: n if taken.count(n) == 1 else f for f, n in names.items()}
    if len(set(labels.values())) < len(labels):
        labels = {folder: folder for folder in data}
    return {labels[folder]: run for folder, run in data.items()}


def _header_name(run: RunData) -> str | None:
    block = run.header.get("run")
    name = block.get("name") if isinstance(block, dict) else None
    if not isinstance(name, str) or not name.strip():
        return None
    path = run.path.resolve()
    folder = path.parent.name if path.name == RUN_FOLDER else path.name
    return folder if name.endswith(f"/{folder}") else name


def summarize(runs: Mapping[str, RunData]) -> Summary:
    """Compute the table of the report from the data of one or several runs."""
    logged = {name for run in runs.values() for name in run.logged()}
    columns = (*COLUMNS, *(c for c in (*STALE_COLUMNS, *REPLAY_COLUMNS) if PREFIX + c in logged))
    rows = [_row(name, run, split, columns) for name, run in runs.items() for split in run.splits]
    present = tuple(c for c in columns if any(row.values.get(c) is not None for row in rows))
    return Summary(rows=tuple(rows), columns=present)


def _row(name: str, run: RunData, split: str, columns: Sequence[str]) -> Row:
    records = [record for record in run.steps if record.split == split]
    first, last = _ends(run.series(Role.REWARD, split)[1])
    return Row(
        run=name,
        split=split,
        logs=len(records),
        values={column: pooled(run, column, split) for column in columns},
        reward_first=first,
        reward_last=last,
        nonfinite_steps=nonfinite(run, split, run.names.of(Role.LOSS), run.names.of(Role.GRAD_NORM)),
    )


def nonfinite(run: RunData, split: str, *names: str) -> int:
    """Return how many logs of a split have NaN or infinity in a mismatch metric, or in one of these metrics."""
    return sum(
        any(value is None for name, value in record.metrics.items() if name.startswith(PREFIX) or name in names)
        for record in run.steps
        if record.split == split
    )


def pooled(run: RunData, column: str, split: str = "train") -> float | None:
    """Pool one metric over the steps of a split: the maximum, or the mean weighted by tokens or sequences."""
    weight = weight_of(column)
    values: list[float] = []
    weights: list[float | None] = []
    for record in run.steps:
        value = record.metrics.get(PREFIX + column)
        if record.split == split and value is not None:
            values.append(value)
            weights.append(record.metrics.get(weight) if weight else None)
    if not values:
        return None
    if column.removeprefix(NATIVE) in MAXIMA:
        return max(values)
    return _weighted_mean(values, weights)


def _weighted_mean(values: Sequence[float], weights: Sequence[float | None]) -> float | None:
    """Return the mean of the values that have a weight, or the plain mean if none has; None if it is not finite."""
    known = [
        (value, weight) for value, weight in zip(values, weights, strict=True) if weight is not None and weight > 0
    ]
    if not known:
        known = [(value, 1.0) for value in values]
    mean = sum(value * weight for value, weight in known) / sum(weight for _, weight in known)
    return mean if math.isfinite(mean) else None


def replay_k3(run: RunData, split: str = "train") -> tuple[float, float] | None:
    """Return k3 without and with routing replay over the logs of a split that have both; None if no log has both."""
    names = [PREFIX + name for name in (f"{NATIVE}k3_kl", "k3_kl", f"{NATIVE}tokens")]
    logs = [[r.metrics.get(name) for name in names] for r in run.steps if r.split == split]
    # Both get one weight, because a log may pool more batches than were scored without replay.
    both = [(native, k3, tokens) for native, k3, tokens in logs if native is not None and k3 is not None]
    if not both:
        return None
    without_replay, with_replay, weights = zip(*both, strict=True)
    without, replayed = _weighted_mean(without_replay, weights), _weighted_mean(with_replay, weights)
    return None if without is None or replayed is None else (without, replayed)


def weight_of(column: str) -> str | None:
    """Return the metric that weights the steps in the mean of a metric, given without "mismatch/"; None for a plain mean."""
    kind = next((kind for kind in KINDS if column.startswith(kind)), "")
    plain = column.removeprefix(kind)
    count_name = WEIGHTS.get(plain, ROUTING_WEIGHT if plain.startswith("routing/") else "tokens")
    if count_name and plain != column:
        count_name = kind + count_name
    return f"{PREFIX}{count_name}" if count_name else None


def _ends(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    known = [value for value in values if value is not None]
    if not known:
        return None, None
    window = max(1, min(REWARD_WINDOW, len(known) // 2))
    return sum(known[:window]) / window, sum(known[-window:]) / window


# Profiles.


@dataclass(frozen=True, kw_only=True)
class Pooled:
    """One profile: each bin's token count, mean |Δlogp| and largest |Δlogp| (nat); None in empty bins."""

    edges: tuple[float, ...]
    count: tuple[float, ...]
    mean: tuple[float | None, ...]
    largest: tuple[float | None, ...]

    @property
    def gap_share(self) -> tuple[float | None, ...]:
        """Each bin's share of the summed |Δlogp|."""
        sums = [n * (m or 0.0) for n, m in zip(self.count, self.mean, strict=True)]
        total = sum(sums)
        return tuple(s / total if total > 0 and n > 0 else None for s, n in zip(sums, self.count, strict=True))


def pool_profile(run: RunData, name: str, split: str) -> Pooled | None:
    """Pool the records of one profile over all steps of a split that share the first record's bins; None if all are empty."""
    records = [r.profiles[name] for r in run.profiles if r.split == split and name in r.profiles]
    records = [r for r in records if r["edges"] == records[0]["edges"] and len(r["count"]) == len(records[0]["count"])]
    if not records:
        return None
    columns = {
        key: np.array([r[key] for r in records], np.float64) for key in ("count", "abs_diff_mean", "abs_diff_max")
    }
    count = columns["count"].sum(0)
    total = (columns["count"] * np.nan_to_num(columns["abs_diff_mean"])).sum(0)
    if not 0 < count.sum() < math.inf or not math.isfinite(total.sum()):
        return None
    largest = [
        max((v for v in column if not math.isnan(v)), default=None) for column in columns["abs_diff_max"].T.tolist()
    ]
    pairs = zip(total.tolist(), count.tolist(), strict=True)
    return Pooled(
        edges=tuple(edge or 0.0 for edge in records[0]["edges"]),
        count=tuple(count.tolist()),
        mean=tuple(gap / tokens if tokens > 0 else None for gap, tokens in pairs),
        largest=tuple(largest),
    )


# Numerics and drift, in runs whose rollouts may have been sampled with older weights.


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


# Text.


def quantity(value: float | None, digits: int = 3) -> str:
    """Write a number with a few significant digits: 0.0123, 2.1e-6, 8.1, 12000; a dash for None."""
    if value is None:
        return "–"
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    if 1e-3 <= abs(value) < 1e6:
        text = f"{value:.{digits}g}"
        return f"{float(text):.0f}" if "e" in text else text
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    return f"{mantissa}e{int(exponent)}"
