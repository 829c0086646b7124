"""The numbers of the report: one row per run and split, and the profiles of the gap."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mismatch_ext.host_logs import read_runs
from mismatch_ext.log_reading import RUN_FOLDER, RunData
from mismatch_ext.names import PREFIX, TAUS, Role
from mismatch_ext.pooling import ABS_DIFF_MAX, ABS_DIFF_MEAN, NATIVE, Floats, nonfinite, pooled

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
    _, rewards = run.finite(Role.REWARD, split)
    first, last = _ends(rewards)
    return Row(
        run=name,
        split=split,
        logs=len(run.tables[split].steps),
        values={column: pooled(run, column, split) for column in columns},
        reward_first=first,
        reward_last=last,
        nonfinite_steps=nonfinite(run, split, run.names.of(Role.LOSS), run.names.of(Role.GRAD_NORM)),
    )


def _ends(values: Floats) -> tuple[float | None, float | None]:
    """Return the mean of the first few values and that of the last few."""
    if not len(values):
        return None, None
    window = max(1, min(REWARD_WINDOW, len(values) // 2))
    return sum(values[:window].tolist()) / window, sum(values[-window:].tolist()) / window


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
