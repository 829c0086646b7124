"""The numbers of the report: one row per run and split, and ratios between runs.

Each number is pooled over all recorded steps of a split. Means of steps are weighted by the number of tokens (or sequences) that
each step measured, if the stream records it, so that the result is the mean over all tokens. A maximum is taken over all steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from mismatch_ext.host_names import PREFIX as PREFIX
from mismatch_ext.host_names import Role
from mismatch_ext.log_reading import RunData, find_runs, read_run
from mismatch_ext.metrics.names import PARTS_OF_STALE

NATIVE = "native/"
KINDS = (NATIVE, *(f"{PARTS_OF_STALE[0]}{source}/" for source in ("batch", "buffer")), *PARTS_OF_STALE)
"""Prefixes of figures over other tokens, or from another pass, than the gap; each prefix has its own count of tokens."""
# Metric -> the count that weights it; tokens by default. None means a plain mean over steps: ESS describes one batch.
ROUTING_WEIGHT = "routing/compared_tokens"
WEIGHTS = {"seq_kl": "sequences", "seq_k3_kl": "sequences", "ess_token": None, "ess_seq": None, "source": None}

ABS_DIFF_MEAN = "logp_abs_diff_mean"
ABS_DIFF_MAX = "logp_abs_diff_max"
MAXIMA = (ABS_DIFF_MAX,)
COLUMNS = (ABS_DIFF_MEAN, ABS_DIFF_MAX, "kl", "k3_kl", "seq_kl", "seq_k3_kl", "ess_token", "ess_seq")
STALE_COLUMNS = ("numerics/" + ABS_DIFF_MEAN, "numerics/k3_kl")
"""Columns of runs whose rollouts may have been sampled with older weights."""
RATIO_COLUMNS = (ABS_DIFF_MEAN, ABS_DIFF_MAX, "k3_kl", "seq_kl", "seq_k3_kl")
# With up to this many runs, every pair is compared; with more, each run is compared with the run of the smallest gap.
MAX_PAIRED_RUNS = 4
# Number of steps averaged at either end for "reward first -> last"; fewer if a run is shorter than twice this.
REWARD_WINDOW = 5


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run and split: `values` by metric name without prefix; None if nothing finite was recorded."""

    run: str
    split: str
    steps: int
    values: dict[str, float | None]
    reward_first: float | None = None
    reward_last: float | None = None
    nonfinite_steps: int = 0


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """Numbers of one run divided by those of another, for the same split."""

    split: str
    run: str
    over: str
    values: dict[str, float | None]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """All rows and ratios; `columns` lists the metrics that at least one row has."""

    rows: tuple[Row, ...]
    ratios: tuple[Ratio, ...]
    columns: tuple[str, ...] = field(default=COLUMNS)

    def row(self, run: str, split: str = "train") -> Row | None:
        """Return the row of a run and split, or None."""
        return next((row for row in self.rows if row.run == run and row.split == split), None)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON-able data."""
        return asdict(self)


def load_runs(directory: str | Path) -> dict[str, RunData]:
    """Read every run at a path, keyed by the name the report shows.

    The name is the one in the run's header; or the folder's, if the header has none or two runs share it.

    Raises:
        RunDirectoryError: The path holds no run.
    """
    data = {folder: read_run(path) for folder, path in find_runs(directory).items()}
    names = {folder: _header_name(run) or folder for folder, run in data.items()}
    taken = list(names.values())
    labels = {f: n if taken.count(n) == 1 else f for f, n in names.items()}
    if len(set(labels.values())) < len(labels):
        labels = {folder: folder for folder in data}
    return {labels[folder]: run for folder, run in data.items()}


def _header_name(run: RunData) -> str | None:
    block = run.header.get("run")
    name = block.get("name") if isinstance(block, dict) else None
    return name if isinstance(name, str) and name.strip() else None


def summarise(runs: Mapping[str, RunData]) -> Summary:
    """Compute the table of the report from the data of one or several runs."""
    tails = {name for run in runs.values() for name in run.logged()}
    thresholds = sorted(filter(_is_tail, (n.removeprefix(PREFIX) for n in tails)), key=lambda n: float(n[2:]))
    columns = (*COLUMNS[:6], *thresholds, *COLUMNS[6:], *(c for c in STALE_COLUMNS if PREFIX + c in tails))
    rows = [_row(name, run, split, columns) for name, run in runs.items() for split in run.splits]
    present = tuple(c for c in columns if any(row.values.get(c) is not None for row in rows))
    return Summary(rows=tuple(rows), ratios=tuple(_ratios(rows)), columns=present)


def _is_tail(name: str) -> bool:
    return name.startswith("f_") and name[2:].replace(".", "", 1).isdecimal()


def _row(name: str, run: RunData, split: str, columns: Sequence[str]) -> Row:
    records = [record for record in run.steps if record.split == split]
    broken = sum(any(v is None for k, v in r.metrics.items() if k.startswith(PREFIX)) for r in records)
    first, last = _ends(run.series(Role.REWARD, split)[1])
    return Row(
        run=name,
        split=split,
        steps=sum(record.split == split for record in run.steps),
        values={column: pooled(run, column, split) for column in columns},
        reward_first=first,
        reward_last=last,
        nonfinite_steps=broken,
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
    known = [weight for weight in weights if weight is not None and weight > 0]
    if len(known) < len(values):
        known = [1.0] * len(values)
    mean = sum(v * w for v, w in zip(values, known, strict=True)) / sum(known)
    return mean if math.isfinite(mean) else None


def weight_of(column: str) -> str | None:
    """Return the metric that weights the steps in a metric's mean over the run; None for a plain mean.

    Args:
        column: Name of the metric without "mismatch/".
    """
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


def _ratios(rows: Sequence[Row]) -> list[Ratio]:
    ratios = []
    for split in dict.fromkeys(row.split for row in rows):
        group = [row for row in rows if row.split == split and (row.values.get(ABS_DIFF_MEAN) or 0) > 0]
        group.sort(key=lambda row: -(row.values[ABS_DIFF_MEAN] or 0))
        pairs = list(combinations(group, 2))
        if len(group) > MAX_PAIRED_RUNS:
            pairs = [(row, group[-1]) for row in group[:-1]]
        for upper, lower in pairs:
            values = {c: _divide(upper.values.get(c), lower.values.get(c)) for c in RATIO_COLUMNS}
            ratios.append(Ratio(split=split, run=upper.run, over=lower.run, values=values))
    return ratios


def _divide(upper: float | None, lower: float | None) -> float | None:
    # A signed or zero estimate (k1 of a tiny gap) has no meaningful ratio.
    if upper is None or lower is None or upper <= 0 or lower <= 0:
        return None
    ratio = upper / lower
    return ratio if math.isfinite(ratio) else None
