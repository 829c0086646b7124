"""The verdict in a few sentences, and the thresholds it rests on.

Thresholds on the mean |log-probability difference| per token (nat) and on k3 (nat per token), besides those of
`mismatch_ext.alarms`:

    SAME_ABS_DIFF     1e-4  float32 on both sides leaves 1e-7 to 1e-5 on the models this package is tested
                            with; ten times that is still rounding, and a plumbing error is far above it.
    HEALTHY_ABS_DIFF  0.02  TRL issue #5312: 0.010 to 0.018 in healthy bfloat16 runs.
    LARGE_K3          1e-2  The tinker cookbook asks for a KL (v1) below 0.01.

The size of a gap says little without the model's own rounding. Where the doctor has measured that, a gap that it calls clean is
small, and one of `ROUNDINGS` times the rounding is not. A cause that is known for sure outranks the size: one that the doctor has
confirmed, or a penalty that the engine samples with.

Rounding makes normally distributed differences, whose k3 is pi/4 times the square of the mean
|difference|. If k3 is more than `FEW_TOKENS` times that square, few tokens carry the gap: for example, those whose experts flip
in a mixture-of-experts router.

A mean over all steps hides what happened at some of them. So a built-in alarm that was raised, an end of the run whose gap is
`FAR_ABOVE` times that of the steps before, and a check that failed are named with their first step. After one of them no gap
counts as small. The step of a rise is that from which on the median of three logs is above `RISEN` times the steps before.

One step can lift the mean over all of them. At most one step in fifty, or one of fewer, whose gap is more than `OUTLIER` times
the median is named as an outlier step if later steps are usual again, and the level is that of the other steps. A small gap
does not mean that all is well: importance weights of whole responses can leave little of the update, which is named below a
mean weight of `LITTLE_LEFT`, and so is a run that trains nothing.

The weight check scores probe tokens on both sides, at temperature 1 and without sampling. Their gap is what dtypes and kernels
explain. If that is less than half of the run's gap, no dtype is blamed for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from mismatch_ext.alarms import GROWTH_LOW, HEALTHY_K3, PATIENCE, PHANTOM, SKIPPED, STALE_ABS_DIFF, built_in
from mismatch_ext.log_reading import METRICS_FILE, EventRecord, RunData
from mismatch_ext.names import CORRECTION_MEASURES, PREFIX, Role
from mismatch_ext.precision.dtypes import spelled
from mismatch_ext.report.closing import (
    bad_rows,
    failed_checks,
    kept_events,
    replays,
    section,
    times,
    too_many_bad_rows,
)
from mismatch_ext.report.doctor import Why
from mismatch_ext.report.summary import (
    ABS_DIFF_MEAN,
    FLIPS,
    NUMERICS,
    Parts,
    Row,
    Summary,
    nonfinite,
    parts,
    pooled,
    quantity,
    replay_k3,
)
from mismatch_ext.weights import MOVING_EVENT, STILL_EVENT, UNTRAINED_EVENT

SAME_ABS_DIFF = 1e-4
HEALTHY_ABS_DIFF = 0.02
LARGE_K3 = 1e-2
FEW_TOKENS = 8.0
ROUNDINGS = 3.0
# A choice: medians of a few batches whose sizes have a heavy tail differ by a factor of 2 by chance.
FAR_ABOVE = 3.0
RISEN = 1.5
# Choices: ten times the median, because batches with a heavy tail reach three times; and so few steps that they are exceptions.
OUTLIER = 10.0
LEAST_STEPS, STEPS_PER_OUTLIER = 10, 50
# A choice: then more than three tenths of the update are gone, where a gap of healthy size costs nothing.
LITTLE_LEFT = 0.7
# verl computes k3 in float32, in which rounding alone makes some 1e-8.
K3_ROUNDING = 1e-7
MAX_ALARMS = 3
# From this ratio between two runs on, one is recommended.
CLEAR_RATIO = 2.0

SAME, SMALL, WARNED, ELEVATED, CAUSED, LARGE = "same", "small", "warned", "elevated", "caused", "large"
UNKNOWN, MIXED = "unknown", "mixed"
LEVELS = (SAME, SMALL, WARNED, ELEVATED, CAUSED, LARGE)
# Level -> its label, and what it says of one run and of several.
WORDS = {
    SAME: ("same policy", "computes the same policy on both sides", "compute the same policy on both sides"),
    SMALL: ("small gap", "has a small gap", "have a small gap"),
    WARNED: (
        "small gap, with warnings",
        "has a small gap, with warnings",
        "have a small gap, with warnings",
    ),
    ELEVATED: (
        "elevated gap",
        "has a gap above what healthy runs report",
        "have a gap above what healthy runs report",
    ),
    CAUSED: ("known cause", "has a gap with a known cause", "have a gap with a known cause"),
    LARGE: ("large gap", "has a gap as large as stale weights cause", "have a gap as large as stale weights cause"),
    UNKNOWN: ("not measured", "recorded no mismatch metrics", "recorded no mismatch metrics"),
    MIXED: (
        "numerics unknown",
        "has stale rollouts and no token of one version, so that numerics and drift cannot be told apart",
        "have stale rollouts and no token of one version, so that numerics and drift cannot be told apart",
    ),
}


DOCTOR = {
    "stock TRL": "mismatch-ext doctor --trl FILE --prompts FILE --out DIR",
    "stock verl": "mismatch-ext doctor --verl OVERRIDES --out DIR, with those of main_ppo",
}
"""The doctor's command, by who wrote a log without this package."""
NO_CORRECTION = {"preset": "disabled"}
UNTRAINED = {
    UNTRAINED_EVENT: "make the parameters trainable that are to be trained (peft: is_trainable=True)",
    STILL_EVENT: "look at the learning rate, at which parameters are trainable, and at whether rewards differ within a prompt",
}
"""What to do about a run that trains nothing, by the event that says so."""
ENDS = {"failed": "ended with an error", "interrupted": "was interrupted"}
TELL_APART = (
    "let rollouts be less stale, so that a batch has tokens of the weights that score it, before changing anything for that "
    "gap"
)
NO_PRECISION = (
    "what is left is drift, which no precision closes: let importance weights correct it, or let rollouts be less stale"
)


@dataclass(frozen=True, kw_only=True)
class RunVerdict:
    """Judgement of one run: the level of its worst split, and the facts that the sentence uses."""

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
    # Share of tokens and layers at which the trainer would not choose what it replays.
    other_experts: float | None = None
    k3_without_replay: float | None = None  # this and the next of the same logs
    k3_with_replay: float | None = None


def level_of(abs_diff_mean: float | None, k3: float | None) -> str:
    """Return same, small, elevated or large for a mean |Δlogp| and a k3; unknown without either, never same by k3 alone."""
    if abs_diff_mean is None and k3 is None:
        return UNKNOWN
    if abs_diff_mean is not None and abs_diff_mean <= SAME_ABS_DIFF:
        return SAME
    # Stock verl logs k3 alone, in float32, where the k3 of a gap that small is 0 or rounding. If differences are normally
    # distributed, their mean size follows from k3.
    kl = max(k3 or 0.0, 0.0)
    if abs_diff_mean is None:
        abs_diff_mean = _mean_of(kl)
    if abs_diff_mean >= STALE_ABS_DIFF or kl >= LARGE_K3:
        return LARGE
    return ELEVATED if abs_diff_mean > HEALTHY_ABS_DIFF or kl > HEALTHY_K3 else SMALL


def judge(name: str, run: RunData, summary: Summary, why: Sequence[Why] = ()) -> RunVerdict:
    """Judge one run by its worst split and what the doctor found of it; stale rollouts are judged only by their numerics."""
    outliers = _outliers(run)
    left_out = () if outliers is None or outliers.at_the_end else outliers.steps
    usual = _without(run, left_out) if left_out else run
    known = parts(usual)
    rows = [row for row in summary.rows if row.run == name]
    if outliers is not None:
        rows = [_of_steps(row, usual) if row.split == "train" else row for row in rows]
    if known is not None:
        rows = [_of_numerics(row, known) if row.split == "train" else row for row in rows]
    rows = [row for row in rows if any(row.values.get(x) is not None for x in (ABS_DIFF_MEAN, "k3_kl"))]
    main = next((row for row in rows if row.split == "train"), rows[0] if rows else None)
    worst = max(rows, key=_severity, default=None)
    found = next(
        (each for each in why if each.is_of(_folder(run))), why[0] if len(why) == 1 == len(summary.runs) else None
    )
    penalty = _penalty(run)
    level = level_of(_mean(worst), worst.values.get("k3_kl") if worst else None)
    if known is not None and known.numerics is None:
        level = MIXED
    elif level in LEVELS:
        level = _by_cause(level, _mean(worst), found, penalty)
    warnings = _warnings(run, level, worst, outliers)
    of_gap = [warning for warning in warnings if warning.about_gap]
    split = main.split if main else "train"
    k3_without_replay, k3_with_replay = replay_k3(run, split) or (None, None)
    if warnings and level in LEVELS:
        level = max(level, WARNED, key=LEVELS.index)
    return RunVerdict(
        run=name,
        level=level,
        mean=_mean(main),
        split=split,
        worst_mean=_mean(worst),
        worst_split=worst.split if worst else "train",
        k3=main.values.get("k3_kl") if main else None,
        trainer_dtype=side_dtype(run.header.get("trainer")),
        engine_dtype=side_dtype(run.header.get("engine")),
        cause=(found.advice if found is not None and found.confirmed else None)
        or penalty
        or next((warning.advice for warning in warnings if warning.leads), None)
        or _known_cause(run, main, late=bool(of_gap) and _came_late(run, of_gap[0]))
        or next((warning.advice for warning in warnings if warning.advice), None)
        or (_unexplained(run, main, level) if found is None else found.advice),
        status=run.ending.status,
        ended=run.ending.of,
        parts=known,
        rounding=None if found is None else found.rounding,
        warnings=tuple(warning.said for warning in warnings),
        corrected=_corrected(run),
        outliers=left_out,
        other_experts=pooled(run, FLIPS, split),
        k3_without_replay=k3_without_replay,
        k3_with_replay=k3_with_replay,
    )


def _folder(run: RunData) -> Path:
    return run.path.parent if run.path.name == METRICS_FILE else run.path


def _corrected(run: RunData) -> bool:
    """Whether a `correction` section acted; the preset `disabled` does nothing unless another key overrides it."""
    keys = section(run, "correction")
    return keys is not None and {name: value for name, value in keys.items() if value is not None} != NO_CORRECTION


def _by_cause(level: str, mean: float | None, found: Why | None, penalty: str | None) -> str:
    """Return the level of a run with this gap, in nats, whose size alone has `level`, by what is known besides the size."""
    at_least = SAME
    if penalty is not None or (found is not None and found.confirmed):
        at_least = CAUSED
    elif found is not None and found.verdict == "clean":
        # The doctor looked at one batch: a gap that grew afterwards is none that it called clean.
        as_it_saw = mean is not None and mean <= CLEAR_RATIO * found.mean
        return SMALL if level == ELEVATED and as_it_saw else level
    elif found is not None and (found.rounding or 0.0) >= ROUNDINGS:
        at_least = ELEVATED
    return max(level, at_least, key=LEVELS.index)


def _penalty(run: RunData) -> str | None:
    """Say that the engine samples with a penalty, which the trainer's policy does not have; None without one."""
    sampling = run.header.get("sampling")
    value = sampling.get("repetition_penalty") if isinstance(sampling, dict) else None
    if not isinstance(value, (int, float)) or value == 1:
        return None
    return f"its engine applies repetition_penalty={value:g} and its trainer does not, so set it to 1 or leave it out"


def _of_numerics(row: Row, known: Parts) -> Row:
    return replace(row, values={**row.values, ABS_DIFF_MEAN: known.numerics, "k3_kl": known.k3})


def _of_steps(row: Row, run: RunData) -> Row:
    values = {column: pooled(run, column, row.split) for column in (ABS_DIFF_MEAN, "k3_kl")}
    return replace(row, values={**row.values, **values})


def _without(run: RunData, steps: Sequence[int]) -> RunData:
    """Return a run without the logs of some steps of its training."""
    return replace(run, steps=tuple(r for r in run.steps if r.split != "train" or r.step not in steps))


def _mean(row: Row | None) -> float | None:
    return row.values.get(ABS_DIFF_MEAN) if row else None


def _severity(row: Row) -> tuple[int, float]:
    mean = row.values.get(ABS_DIFF_MEAN)
    return LEVELS.index(level_of(mean, row.values.get("k3_kl"))), mean or 0.0


def side_dtype(side: Any) -> str | None:
    """Return the dtype a side computes in: its autocast or model dtype, otherwise the one dtype of all its weights."""
    if not isinstance(side, dict):
        return None
    for key in ("compute_dtype", "autocast_dtype", "model_dtype", "dtype"):
        if isinstance(side.get(key), str):
            return spelled(side[key])
    weights = side.get("parameter_dtypes")
    names = list(weights) if isinstance(weights, (list, dict)) else []
    return spelled(names[0]) if len(names) == 1 and isinstance(names[0], str) else None


@dataclass(frozen=True, kw_only=True)
class _Warning:
    """What the mean over all steps does not tell; `advice` is None where the size of the gap has a better one."""

    step: int  # the first
    said: str
    advice: str | None
    of_k3: str | None = None  # the metric that is above HEALTHY_K3
    of_gap: bool = False  # whether it is an alarm about the gap that is still raised
    about_gap: bool = True  # whether it is about the gap of several steps, and not about one step or the update
    leads: bool = False  # whether its advice goes before that for the dtypes of the two sides


@dataclass(frozen=True, kw_only=True)
class _Outliers:
    """Steps whose gap is far above that of all others, with the figure that shows it."""

    steps: tuple[int, ...]
    figure: str
    largest: float
    median: float
    at_the_end: bool  # whether no usual steps follow, so that it may be the beginning of a collapse


def _outliers(run: RunData) -> _Outliers | None:
    """Find the few steps of training whose gap is far above the median; None without any, or if they are no exception."""
    part = "" if parts(run) is None else NUMERICS
    for figure, name, power in (("mean |Δlogp|", ABS_DIFF_MEAN, 1), ("k3", "k3_kl", 2)):
        # k3 grows with the square of the differences.
        least = SAME_ABS_DIFF if power == 1 else max(K3_ROUNDING, SAME_ABS_DIFF**2)
        steps, values = run.series(f"{PREFIX}{part}{name}")
        known = [(step, value) for step, value in zip(steps, values, strict=True) if value is not None]
        if len(known) < LEAST_STEPS:
            continue
        usual = median(value for _, value in known)
        limit = max(least, usual * OUTLIER**power)
        beyond = {step: value for step, value in known if value > limit}
        if 0 < len(beyond) <= max(1, len(known) // STEPS_PER_OUTLIER):
            return _Outliers(
                steps=tuple(beyond),
                figure=figure,
                largest=max(beyond.values()),
                median=usual,
                at_the_end=any(step in beyond for step, _ in known[-PATIENCE:]),
            )
    return None


def _of_outliers(found: _Outliers) -> _Warning:
    steps, size = _steps(found.steps), f"{found.figure} {quantity(found.largest, 2)}"
    if found.at_the_end:
        what = f"{steps}, at the end of the log, may be where the run breaks: {size}"
    elif len(found.steps) == 1:
        what = f"{steps} is an outlier step: {size}"
    else:
        what = f"{steps} are outlier steps: up to {size}"
    return _Warning(
        step=found.steps[0],
        said=f"{what}, median {quantity(found.median, 2)} over all steps",
        advice=f"look at the batch of {steps}, where few tokens may carry the whole gap",
        about_gap=False,
    )


def _steps(steps: Sequence[int]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {_join([str(step) for step in steps])}"


def _little_left(run: RunData) -> _Warning | None:
    """Name the step from which on importance weights leave little of the update; None if they do not."""
    measure = CORRECTION_MEASURES["rollout_is_mean"]
    names = [PREFIX + "rollout_is_mean", measure.trl, measure.verl]
    name = next((name for name in names if run.series(name)[0]), names[0])
    steps, values = run.series(name)
    known = [(step, value) for step, value in zip(steps, values, strict=True) if value is not None]
    weights = [weight for _, weight in known]
    for at in range(len(weights) - PATIENCE + 1):
        low_at_first = max(weights[at : at + PATIENCE]) < LITTLE_LEFT
        if low_at_first and median(weights[at:]) < LITTLE_LEFT:
            step, left = known[at][0], sum(weights[at:]) / len(weights[at:])
            return _Warning(
                step=step,
                said=f"from step {step} on the mean importance weight is below {LITTLE_LEFT:g} although the gap is small: the "
                f"weights leave {left:.0%} of the update, {weights[-1]:.0%} at the end",
                advice=f"weigh tokens instead of whole responses ({_by_token(run, name)})",
                about_gap=False,
                leads=True,
            )
    return None


def _by_token(run: RunData, name: str) -> str:
    """Return the setting of whoever weighs in this run, given the name under which it logs the mean weight."""
    if _corrected(run) or name.startswith(PREFIX):
        return "mismatch.correction.preset: token_truncate"
    if name == CORRECTION_MEASURES["rollout_is_mean"].verl:
        return "algorithm.rollout_correction.rollout_is: token"
    return "vllm_importance_sampling_mode: token_truncate"


def _nothing_learned(run: RunData) -> list[_Warning]:
    """Return the warnings that the run itself gave of an optimizer that changes nothing, unless it went on to change weights."""
    found = []
    moving = kept_events(run, MOVING_EVENT)
    for name, advice in UNTRAINED.items():
        if events := kept_events(run, name):
            first, last = events[0], events[-1]
            if any(event.step > last.step for event in moving):
                continue
            said = f"at step {first.step}: {first.message.rstrip('.')}"
            found.append(_Warning(step=first.step, said=said, advice=advice, about_gap=False, leads=True))
    return found


def _size(row: Row | None) -> float | None:
    """Return the mean |Δlogp| of a row, estimated from k3 where it has no other."""
    mean, k3 = _mean(row), row.values.get("k3_kl") if row else None
    return _mean_of(k3) if mean is None and k3 is not None else mean


def _bad_rows(run: RunData) -> list[_Warning]:
    """Return what is said of the rows that were left out of the loss, and that they have ended the run if they have."""
    ended = too_many_bad_rows(run)
    found = []
    if ended is not None:
        said = f"too many bad rows ended the run at step {ended.step}"
        found.append(_Warning(step=ended.step, said=said, advice='repair their cause, under "Bad rows"'))
    for row in bad_rows(run):
        rows = "1 row was" if row.rows == 1 else f"{row.rows} rows were"
        said = f"{rows} bad ({row.reason}), first at step {row.first_step}"
        advice = 'look at the bad rows, under "Bad rows"' if ended is None else None
        found.append(_Warning(step=row.first_step, said=said, advice=advice))
    return found


def _warnings(run: RunData, level: str, worst: Row | None, outliers: _Outliers | None) -> list[_Warning]:
    """Return what the mean over all steps of a run with this level does not tell; those with advice first."""
    found = _alarms(run, level)
    late = _late(run)
    if late is not None and not any(w.of_gap and w.advice and w.step <= late.step for w in found):
        leads = all(late.step < warning.step for warning in found if warning.advice)
        found.insert(0 if leads else len(found), late)
    found += [
        _Warning(
            step=row.first_step,
            said=f"the check {row.check} failed {times(row.times)}, first at step {row.first_step}",
            advice='follow the failed checks, under "Checks"',
        )
        for row in failed_checks(run)
    ]
    found += _bad_rows(run)
    if outliers is not None:
        found.append(_of_outliers(outliers))
    known = parts(run)
    # Weights also correct for staleness, so that the whole gap counts.
    size = _size(worst) if known is None else known.total
    weighed = _little_left(run) if size is not None and size < HEALTHY_ABS_DIFF else None
    if weighed is not None:
        found.insert(0, weighed)
    found = _nothing_learned(run) + found
    return sorted(found, key=lambda warning: warning.advice is None)


def _alarms(run: RunData, level: str) -> list[_Warning]:
    """Return the alarms that were raised, by metric and in the order of their first steps, but those of stale weights first."""
    histories: dict[str, list[EventRecord]] = {}
    for event in kept_events(run, "alarm"):
        histories.setdefault(event.data["metric"], []).append(event)
    raised = [(metric, events[0].data, events[-1]) for metric, events in histories.items()]
    raised = [(metric, first, last) for metric, first, last in raised if not _is_warm_up(run, metric, first, last)]
    raised.sort(key=lambda alarm: (alarm[1]["threshold"] != STALE_ABS_DIFF, alarm[1]["first_step"]))
    found = [_alarm(run, metric, first, last, level) for metric, first, last in raised[:MAX_ALARMS]]
    if (more := len(raised) - MAX_ALARMS) > 0:
        found.append(
            _Warning(said=f"{more} more {'alarm was' if more == 1 else 'alarms were'} raised", step=0, advice=None)
        )
    return found


def _is_warm_up(run: RunData, metric: str, first: Mapping[str, Any], last: EventRecord) -> bool:
    """Tell whether an alarm is of the few first steps that float16 skips because the loss scale starts too high."""
    once = last.data["status"] == "cleared" and last.data["first_step"] == first["first_step"] == run.first_step
    if metric != run.names.of(Role.GRAD_NORM) or first["threshold"] is not None or not once:
        return False
    steps, norms = run.series(metric)
    return sum(norm is None for step, norm in zip(steps, norms, strict=True) if step <= last.step) <= SKIPPED


def _alarm(run: RunData, metric: str, first: Mapping[str, Any], last: EventRecord, level: str) -> _Warning:
    """Return what an alarm says, from the data of its first event and the last one; the built-in rule's text if it is that."""
    step, threshold, rule = first["first_step"], first["threshold"], built_in(metric, run.names)
    where = "not finite" if threshold is None else f"{first['side']} {threshold:g}"
    fact = f"{metric.removeprefix(PREFIX)} {where}"
    span = f"from step {step} {f'to {last.step}' if last.data['status'] == 'cleared' else 'on'}"
    bounds = () if rule is None else (rule.above, rule.below)
    if rule is None or (threshold not in bounds if threshold is not None else bounds != (None, None)):
        return _Warning(step=step, said=f"{span} {fact}", advice=f"look at what else changed at step {step}")
    if rule.metric == GROWTH_LOW:
        # A log is out of bounds because of all those before it.
        span = f"by step {step}{f', and until step {last.step},' if last.data['status'] == 'cleared' else ''}"
    of_k3 = metric if rule.numerics and threshold == HEALTHY_K3 else None
    # The level says the same, and its advice fits the run's dtypes.
    known = of_k3 is not None and level in (ELEVATED, CAUSED, LARGE)
    said = f"{span} {rule.meaning}" + (f" ({fact})" if metric in run.logged("train") else "")
    of_gap = rule.numerics and last.data["status"] != "cleared"
    return _Warning(
        step=step, said=said, advice=None if known else rule.advised(replays(run)), of_k3=of_k3, of_gap=of_gap
    )


def _came_late(run: RunData, warning: _Warning) -> bool:
    """Tell whether the first logs had nothing of what a warning is about: a k3 must have been far smaller before it."""
    if warning.of_k3 is None or warning.step <= run.first_step:
        return warning.step > run.first_step
    sizes = [(step, _mean_of(k3)) for step, k3 in zip(*run.series(warning.of_k3), strict=True) if k3 is not None]
    before = [size for step, size in sizes if step < warning.step]
    after = [size for step, size in sizes if step >= warning.step]
    return bool(before and after) and median(after) > FAR_ABOVE * median(before)


def _late(run: RunData) -> _Warning | None:
    """Compare the gap of the last three logs, and of the last tenth, with that of the logs before, by medians."""
    part = "" if parts(run) is None else NUMERICS
    steps, means = run.series(f"{PREFIX}{part}{ABS_DIFF_MEAN}")
    estimated, least = ("", SAME_ABS_DIFF) if steps else (", estimated from k3", _mean_of(K3_ROUNDING))
    if not steps:
        steps, k3 = run.series(f"{PREFIX}{part}k3_kl")
        means = [value if value is None else _mean_of(value) for value in k3]
    known = [(step, mean) for step, mean in zip(steps, means, strict=True) if mean is not None]
    sizes = [mean for _, mean in known]
    for last in (PATIENCE, max(PATIENCE, len(sizes) // 10)):
        if len(sizes) < 2 * last:
            return None
        before = median(sizes[:-last])
        limit = max(least, FAR_ABOVE * before)
        if median(sizes[-last:]) > limit:
            break
    else:
        return None
    first = next(at for at in range(len(sizes) - last, len(sizes)) if sizes[at] > limit)
    while sizes[first - 1] > limit:
        first -= 1
    far, risen = first, max(least, RISEN * before)
    while first >= PATIENCE and median(sizes[first - PATIENCE : first]) > risen:
        first -= 1
    while sizes[first - 1] > risen:
        first -= 1
    # What rises into a plateau and goes on from there much later is two changes: the second is the one to look at.
    first = first if median(sizes[first:]) > limit else far
    step, after = known[first][0], median(sizes[first:])
    return _Warning(
        step=step,
        said=f"from step {step} on the gap has left the level of the steps before, mean |Δlogp| {quantity(after, 2)} after "
        f"{quantity(before, 2)}{estimated}",
        advice=f"look at the weight-sync check and at what else changed at step {step}",
    )


def _mean_of(k3: float) -> float:
    """Return the mean size of normally distributed differences with this k3."""
    return math.sqrt(max(k3, 0.0) * 4 / math.pi)


def _known_cause(run: RunData, main: Row | None, *, late: bool) -> str | None:
    """Name the worst known cause that makes the size of the gap meaningless, if there is one.

    Dtypes that differ from the first step on are not the cause of what came `late`.
    """
    stale = [event.step for event in run.events if event.name == "weight_sync" and event.level != "info"]
    broken = sum(nonfinite(run, split) for split in run.splits)
    stopped = pooled(run, "phantom_clip_frac") or 0.0
    trainer, engine = side_dtype(run.header.get("trainer")), side_dtype(run.header.get("engine"))
    truncated = any((pooled(run, "support_truncated", split) or 0) > 0 for split in run.splits)
    causes = (
        (bool(stale), f"the weight-sync check failed at step {stale[0] if stale else 0}, so fix the weight sync first"),
        (broken > 0, f"{broken} steps hold NaN or infinite mismatch metrics, so look at those first"),
        (
            stopped > PHANTOM,
            f"its clip on π_trainer/π_engine stops {stopped:.0%} of the tokens although the policy has not changed since they "
            "were sampled, which the size of the gap does not tell, so clip on the trainer's own ratio "
            "(correction.preset: decoupled_token_is)",
        ),
        (
            bool(trainer and engine) and trainer != engine and not late and _beyond_rounding(run, main) is None,
            f"its trainer computes in {trainer} and its engine in {engine}, so give both one dtype",
        ),
        (
            truncated,
            f"{PREFIX}support_truncated is set, so switch top_p, top_k and min_p off for an unbiased ratio, or set "
            "mismatch.sampling_mask in TRL",
        ),
    )
    return next((sentence for holds, sentence in causes if holds), None)


def _beyond_rounding(run: RunData, main: Row | None) -> float | None:
    """Return the gap of the weight check's probes, nats, if it is less than half of the run's; None if not, or if unknown."""
    probes, mean = pooled(run, "weight_sync_gap"), _mean(main)
    return probes if probes is not None and mean is not None and 2 * probes < mean else None


def _unexplained(run: RunData, main: Row | None, level: str) -> str | None:
    """Send to the doctor with a gap that dtypes do not explain; None if they do, or if it is small and they are equal."""
    trainer, engine = side_dtype(run.header.get("trainer")), side_dtype(run.header.get("engine"))
    differ = bool(trainer and engine) and trainer != engine
    probes = _beyond_rounding(run, main)
    if probes is None or not (differ or level in (ELEVATED, LARGE)):
        return None
    of = (
        f"its trainer computes in {trainer} and its engine in {engine}, which explains"
        if differ
        else "rounding explains"
    )
    return (
        f"{of} {quantity(probes, 2)} of it, as the weight check's probes show, so ask mismatch-ext doctor for the rest"
    )


def verdict(runs: Mapping[str, RunData], summary: Summary, why: Sequence[Why] = ()) -> str:
    """Say in a few sentences which runs agree, how large the gap is, what dominates it, and what to do."""
    judged = [judge(name, run, summary, why) for name, run in runs.items()]
    measured = [v for v in judged if v.level in LEVELS]
    if not measured and any(v.level == MIXED for v in judged):
        return f"{_levels_clause(judged, judged[0])}: {TELL_APART}."
    if not measured:
        warned = [f" {sentence}." for v in judged for sentence in _warned(v, judged)]
        if all(run.is_host_log for run in runs.values()):
            absent, check = "Neither mean |Δlogp| nor k3 was", "below is what makes the trainer log them"
        else:
            absent, check = (
                "No mismatch metrics were",
                "check that the run got past its first step with a `mismatch:` block",
            )
        return f"{absent} recorded, so nothing can be said about the two policies: {check}.{''.join(warned)}"
    worst = max(measured, key=lambda v: (LEVELS.index(v.level), v.worst_mean or 0.0))
    best = _best_alternative(measured, worst)
    sentences = [_levels_clause(judged, worst)]
    if best is not None and (ratio := (worst.mean or 0) / (best.mean or 1)) >= CLEAR_RATIO:
        sentences.append(f"{worst.run} is {quantity(ratio, 2)} times as far apart as {best.run}")
    if worst.level != SAME and (what := dominates(runs[worst.run], worst)):
        sentences.append(_begun(_in(worst, judged) + what))
    sentences += [_begun(_in(v, judged) + what) for v in judged if replays(runs[v.run]) and (what := _replayed(v))]
    sentences += [sentence for v in judged for sentence in _warned(v, judged)]
    sentences += [f"{v.run} {ENDS[v.status]}" for v in judged if v.status in ENDS]
    then = ". What to do: " if len(sentences) > 1 else ": "
    return f"{'. '.join(sentences)}{then}{_advice(worst, best, judged)}.{_ask(runs[worst.run], worst, why)}"


def _begun(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]


def _warned(v: RunVerdict, judged: Sequence[RunVerdict]) -> list[str]:
    """Return a sentence for each warning, or one for all of a run that is one of several."""
    if len(judged) == 1:
        return [_begun(warning) for warning in v.warnings]
    return [f"In {v.run}, {'; '.join(v.warnings)}"] if v.warnings else []


def _replayed(v: RunVerdict) -> str:
    """Return what replay saves, and how many experts would be others without it; "" if neither was measured."""
    facts = []
    if v.k3_without_replay is not None:
        facts.append(
            f"without replay k3 is {quantity(v.k3_without_replay, 2)}, with it {quantity(v.k3_with_replay, 2)}"
        )
    if v.other_experts is not None:
        facts.append(f"the trainer's routers would choose other experts at {v.other_experts:.2%} of tokens and layers")
    return ", and ".join(facts)


def _ask(run: RunData, worst: RunVerdict, why: Sequence[Why]) -> str:
    """Send the owner of a log without this package to the doctor, unless the gap is small or the doctor was asked."""
    if why or not run.is_host_log or worst.level not in (WARNED, ELEVATED, LARGE):
        return ""
    return f" To learn why: {DOCTOR[run.header['run']['host']]} (docs/doctor.md). What acts on it: docs/index.md, By symptom."


def _in(v: RunVerdict, judged: Sequence[RunVerdict], then: str = " ") -> str:
    return f"in {v.run}{then}" if len(judged) > 1 else ""


def _drifts(known: Parts) -> bool:
    """Whether the whole gap is larger than in healthy runs, and most of it is drift."""
    total = known.total or 0.0
    return total > HEALTHY_ABS_DIFF and total >= CLEAR_RATIO * (known.numerics or 0.0)


def _levels_clause(judged: Sequence[RunVerdict], worst: RunVerdict) -> str:
    parts = []
    unit = "mean |Δlogp| "
    for level in (*LEVELS, MIXED, UNKNOWN):
        group = [v for v in judged if v.level == level]
        if group:
            names = []
            for v in group:
                names.append(_with_numbers(v, unit, detail=v is worst))
                unit = "" if v.mean is not None else unit
            parts.append(f"{_join(names)} {WORDS[level][1 if len(group) == 1 else 2]}")
    return _join(parts)


def _with_numbers(v: RunVerdict, unit: str, *, detail: bool) -> str:
    if v.parts is not None and v.parts.numerics is None and v.parts.total is not None:
        return f"{v.run} ({unit}{quantity(v.parts.total, 2)} of both)"
    if v.mean is None:
        if v.k3 is None:
            return v.run
        estimated = f"from which a mean |Δlogp| of {quantity(_mean_of(v.k3), 2)} is estimated"
        return f"{v.run} (k3 {quantity(v.k3, 2)}, {estimated}{_left_out(v)})"
    text = f"{unit}{quantity(v.mean, 2)}"
    if v.parts is not None and v.split == "train":
        text += f" of numerics, {quantity(v.parts.total, 2)} with the drift of stale rollouts"
    if v.split != "train":
        text += f" on {v.split}"
    if v.rounding is not None:
        text += f", {quantity(v.rounding, 2)} times this model's own rounding"
    if v.split == "train":
        text += _left_out(v)
    if detail and v.worst_split != v.split:
        text += f", {quantity(v.worst_mean, 2)} on {v.worst_split}"
    return f"{v.run} ({text})"


def _left_out(v: RunVerdict) -> str:
    return f", without {_steps(v.outliers)}" if v.outliers else ""


def _join(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]


def _best_alternative(measured: Sequence[RunVerdict], worst: RunVerdict) -> RunVerdict | None:
    """Pick the other run with the smallest gap, if possible one in half precision: float32 is a reference, not a setting."""
    others = [v for v in measured if v is not worst and v.mean and not v.cause]
    half = [v for v in others if v.trainer_dtype in ("float16", "bfloat16")]
    return min(half or others, key=lambda v: v.mean or 0.0, default=None)


def dominates(run: RunData, v: RunVerdict) -> str | None:
    """Say that few tokens carry the gap of a run, as k3 tells; None if they do not."""
    if not v.mean or v.k3 is None or v.k3 <= FEW_TOKENS * v.mean * v.mean:
        return None
    run_block = run.header.get("run")
    model_type = run_block.get("model_type", "") if isinstance(run_block, dict) else ""
    return "few tokens carry the gap" + (
        ", as when experts flip" if "moe" in str(model_type) and not replays(run) else ""
    )


def _advice(worst: RunVerdict, best: RunVerdict | None, judged: Sequence[RunVerdict]) -> str:
    causes: dict[str, list[str]] = {}
    for v in (worst, *(v for v in judged if v is not worst)):
        if v.cause:
            causes.setdefault(v.cause, []).append(v.run)
    if causes:
        return "; ".join(cause if len(judged) == 1 else f"in {_join(runs)} {cause}" for cause, runs in causes.items())
    if worst.level in (SAME, SMALL) and worst.parts is not None and _drifts(worst.parts):
        return NO_PRECISION
    if worst.level == SAME:
        return "nothing to do"
    clear = best is not None and (worst.mean or 0) >= CLEAR_RATIO * (best.mean or 0)
    if best is not None and clear and LEVELS.index(best.level) <= LEVELS.index(SMALL):
        return f"prefer {best.run}"
    if worst.level == LARGE and (worst.worst_mean or 0) >= STALE_ABS_DIFF:
        return "check weight sync, temperature and logprob mode before precision"
    if worst.level == SMALL:
        needed = "no correction is needed" + (" beyond the one that is on" if worst.corrected else "")
        return f"{needed}, keep watching it"
    if "bfloat16" in (worst.trainer_dtype, worst.engine_dtype):
        return "set mismatch.precision.dtype to float16"
    return "rounding alone does not explain it, so check routing, attention kernels and logprob mode"
