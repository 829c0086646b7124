"""The judgment of one run: how large its gap is, what was found, and what to do first.

A run is judged by its worst split. Outlier steps are left out of the figures of training, unless the log ends with them; of stale
rollouts only the numerics are judged. A cause that is known for sure outranks the size of the gap: one that the doctor has
confirmed, or a penalty that the engine samples with. After a finding at some steps no gap counts as small.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mismatch_ext.closing import replays
from mismatch_ext.log_reading import RunData
from mismatch_ext.pooling import ABS_DIFF_MEAN, Parts, parts, pooled, replay_k3
from mismatch_ext.report.doctor import Why
from mismatch_ext.report.findings import Looked, corrects, dtypes_of, find_outliers, findings_of, penalty_of
from mismatch_ext.report.levels import (
    CAUSED,
    CLEAR_RATIO,
    ELEVATED,
    LEVELS,
    MIXED,
    ROUNDINGS,
    SMALL,
    WARNED,
    at_least,
    level_of,
    mean_of_k3,
)
from mismatch_ext.report.summary import FLIPS, Row, Summary

FEW_TOKENS = 8.0
"""Rounding makes normally distributed differences, whose k3 is pi/4 times the square of the mean |difference|.

If k3 is more than this many times that square, few tokens carry the gap: for example, those whose experts flip.
"""


@dataclass(frozen=True, kw_only=True)
class RunVerdict:
    """Judgment of one run: the level of its worst split, and the facts that the sentence uses."""

    run: str
    level: str
    mean: float | None
    split: str
    worst_mean: float | None
    worst_split: str
    k3: float | None
    trainer_dtype: str | None
    engine_dtype: str | None
    cause: str | None
    status: str
    ended: str = "training"
    parts: Parts | None = None
    rounding: float | None = None
    warnings: tuple[str, ...] = ()
    corrected: bool = False  # whether a `correction` section acted
    outliers: tuple[int, ...] = ()  # steps of training that the level, the mean and k3 leave out
    replayed: bool = False  # whether the trainer replayed the engine's routes
    few_tokens: bool = False  # whether few tokens carry the gap, as k3 tells
    experts: bool = False  # whether the model is a mixture of experts
    # Share of tokens and layers at which the trainer would not choose what it replays.
    other_experts: float | None = None
    k3_without_replay: float | None = None  # this and the next of the same logs
    k3_with_replay: float | None = None


def judge_all(runs: Mapping[str, RunData], summary: Summary, why: Sequence[Why] = ()) -> tuple[RunVerdict, ...]:
    """Judge each run, by its rows in the summary and what the doctor found of it."""
    return tuple(judge(name, run, summary, why) for name, run in runs.items())


def judge(name: str, run: RunData, summary: Summary, why: Sequence[Why] = ()) -> RunVerdict:
    """Judge one run by its worst split and what the doctor found of it."""
    outliers = find_outliers(run)
    left_out = () if outliers is None or outliers.at_the_end else outliers.steps
    usual = _without(run, left_out) if left_out else run
    drift = parts(usual)
    rows = [_of_usual_steps(row, usual, drift) for row in summary.rows if row.run == name]
    rows = [row for row in rows if _size(row) is not None]
    main = next((row for row in rows if row.split == "train"), rows[0] if rows else None)
    worst = max(rows, key=_severity, default=None)

    found = _doctors_word(run, summary, why)
    level = _level(run, worst, drift, found)
    looked = Looked(
        run=run,
        level=level,
        size=_mean(main),
        worst_size=_size(worst),
        drift=drift,
        outliers=outliers,
        why=found,
    )
    findings = findings_of(looked)
    warnings = tuple(finding.said for finding in findings if finding.said)
    if warnings and level in LEVELS:
        level = at_least(level, WARNED)

    split = main.split if main else "train"
    mean, k3 = _mean(main), _k3(main)
    trainer_dtype, engine_dtype = dtypes_of(run)
    k3_without_replay, k3_with_replay = replay_k3(run, split) or (None, None)
    return RunVerdict(
        run=name,
        level=level,
        mean=mean,
        split=split,
        worst_mean=_mean(worst),
        worst_split=worst.split if worst else "train",
        k3=k3,
        trainer_dtype=trainer_dtype,
        engine_dtype=engine_dtype,
        cause=next((finding.advice for finding in findings if finding.advice), None),
        status=run.ending.status,
        ended=run.ending.of,
        parts=drift,
        rounding=None if found is None else found.rounding,
        warnings=warnings,
        corrected=corrects(run),
        outliers=left_out,
        replayed=replays(run),
        few_tokens=_is_carried_by_few(mean, k3),
        experts="moe" in _model_type(run),
        other_experts=pooled(run, FLIPS, split),
        k3_without_replay=k3_without_replay,
        k3_with_replay=k3_with_replay,
    )


def _level(run: RunData, worst: Row | None, drift: Parts | None, found: Why | None) -> str:
    """Return the level of the worst split's gap, by its size and by what is known besides the size."""
    level = level_of(_mean(worst), _k3(worst))
    if drift is not None and drift.numerics is None:
        return MIXED
    if level not in LEVELS:
        return level
    if penalty_of(run) is not None:
        return at_least(level, CAUSED)
    if found is None:
        return level
    if found.confirmed:
        return at_least(level, CAUSED)
    mean = _mean(worst)
    if found.verdict == "clean":
        # The doctor looked at one batch: a gap that grew afterwards is none that it called clean.
        is_as_it_saw = mean is not None and mean <= CLEAR_RATIO * found.mean
        return SMALL if level == ELEVATED and is_as_it_saw else level
    if (found.rounding or 0.0) >= ROUNDINGS:
        return at_least(level, ELEVATED)
    return level


def _doctors_word(run: RunData, summary: Summary, why: Sequence[Why]) -> Why | None:
    """Return what the doctor found of a run; its only file is also that of a run that stands alone."""
    for each in why:
        if each.is_of(run.path):
            return each
    if len(why) == 1 and len(summary.runs) == 1:
        return why[0]
    return None


def _without(run: RunData, steps: Sequence[int]) -> RunData:
    """Return a run without the logs of some steps of its training."""
    return replace(run, steps=tuple(r for r in run.steps if r.split != "train" or r.step not in steps))


def _of_usual_steps(row: Row, usual: RunData, drift: Parts | None) -> Row:
    """Return a row of training with the figures of its usual steps, or of their numerics alone."""
    if row.split != "train":
        return row
    if drift is not None:
        size, k3 = drift.numerics, drift.k3
    else:
        size, k3 = pooled(usual, ABS_DIFF_MEAN), pooled(usual, "k3_kl")
    return replace(row, values={**row.values, ABS_DIFF_MEAN: size, "k3_kl": k3})


def _mean(row: Row | None) -> float | None:
    return None if row is None else row.values.get(ABS_DIFF_MEAN)


def _k3(row: Row | None) -> float | None:
    return None if row is None else row.values.get("k3_kl")


def _size(row: Row | None) -> float | None:
    """Return the mean |Δlogp| of a row, estimated from k3 where it has no other."""
    mean, k3 = _mean(row), _k3(row)
    return mean_of_k3(k3) if mean is None and k3 is not None else mean


def _severity(row: Row) -> tuple[int, float]:
    return LEVELS.index(level_of(_mean(row), _k3(row))), _mean(row) or 0.0


def _is_carried_by_few(mean: float | None, k3: float | None) -> bool:
    """Tell whether few tokens carry the gap, as k3 tells."""
    if not mean or k3 is None:
        return False
    return k3 > FEW_TOKENS * mean * mean


def _model_type(run: RunData) -> str:
    block = run.header.get("run")
    return str(block.get("model_type", "")) if isinstance(block, dict) else ""
