"""What is known of one run besides the size of its gap: findings, in the order in which they count.

A finding is a sentence about what was seen, or what to do, or both. A mean over all steps hides what happened at some of them. So
an alarm that was raised, an end of the run whose gap is far above that of the steps before, and a check that failed are findings
with their first step. One step can lift the mean over all of them: at most one step in fifty, or one of fewer, whose gap is more
than `OUTLIER` times the median is an outlier step if later steps are usual again.

A small gap does not mean that all is well. Importance weights of whole responses can leave little of the update, which is a
finding below a mean weight of `LITTLE_LEFT`, and so is a run that trains nothing.

The weight check scores probe tokens on both sides, at temperature 1 and without sampling. Their gap is what dtypes and kernels
explain. If that is less than half of the run's gap, no dtype is blamed for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, auto
from statistics import median
from typing import Any

from mismatch_ext.alarms import GROWTH, HEALTHY_K3, PATIENCE, PHANTOM, SKIPPED, STALE_ABS_DIFF, built_in
from mismatch_ext.closing import bad_rows, failed_checks, kept_events, replays, section, too_many_bad_rows
from mismatch_ext.events import ALARM, NOTHING_TRAINED, WEIGHT_SYNC, WEIGHTS_MOVING, WEIGHTS_STILL
from mismatch_ext.log_reading import EventRecord, RunData
from mismatch_ext.names import CORRECTION_MEASURES, PREFIX, Role
from mismatch_ext.pooling import ABS_DIFF_MEAN, NUMERICS, Parts, nonfinite, parts, pooled
from mismatch_ext.precision.dtypes import spelled
from mismatch_ext.report.change_point import FAR_ABOVE, change_point
from mismatch_ext.report.doctor import Why
from mismatch_ext.report.levels import (
    CAUSED,
    ELEVATED,
    HEALTHY_ABS_DIFF,
    LARGE,
    SAME_ABS_DIFF,
    mean_of_k3,
)
from mismatch_ext.words import counted, joined, quantity, times

OUTLIER = 10.0
"""Batches with a heavy tail reach three times the median. A choice."""
LEAST_STEPS, STEPS_PER_OUTLIER = 10, 50
"""So few steps are exceptions. A choice."""
LITTLE_LEFT = 0.7
"""Then more than three tenths of the update are gone, where a gap of healthy size costs nothing. A choice."""
K3_ROUNDING = 1e-7
"""verl computes k3 in float32, in which rounding alone makes some 1e-8."""
MAX_ALARMS = 3
NO_CORRECTION = {"preset": "disabled"}
NOT_TRAINING = {
    NOTHING_TRAINED: "make the parameters trainable that are to be trained (peft: is_trainable=True)",
    WEIGHTS_STILL: "look at the learning rate, at which parameters are trainable, and at whether rewards differ within a prompt",
}
"""What to do about a run that trains nothing, by the event that says so."""


class Rank(IntEnum):
    """What counts first. The advice for a run is that of its first finding that has one."""

    CONFIRMED = auto()  # the doctor tried the fix of a cause, and the gap fell as predicted
    PENALTY = auto()  # the engine samples with a penalty
    UPDATE = auto()  # little or nothing of the update is left
    MEANINGLESS = auto()  # the size of the gap means nothing
    EVENT = auto()  # it happened at some steps, and the mean over all steps hides it
    SIZE = auto()  # what explains, or does not explain, the size of the gap
    NOTE = auto()  # there is nothing to do about it


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What was found of a run, and what to do.

    Attributes:
        rank: What counts first.
        said: What was seen, with its step; "" if the advice says it.
        advice: What to do; None where the size of the gap has a better advice.
        step: The first step.
        about_gap: Whether it is about the gap of several steps, and not about one step or the update.
        of_k3: The metric that is above `HEALTHY_K3`.
        is_raised: Whether it is an alarm about the gap that is still raised.
    """

    rank: Rank
    said: str = ""
    advice: str | None = None
    step: int = 0
    about_gap: bool = False
    of_k3: str | None = None
    is_raised: bool = False


@dataclass(frozen=True, kw_only=True)
class Looked:
    """What findings are made of.

    Attributes:
        run: The run with all its steps.
        level: Level of the gap by its size and the doctor's word.
        size: Mean |Δlogp| of the split that is judged, nat; None if unknown.
        worst_size: The same of the worst split, estimated from k3 where nothing else was logged.
        drift: Numerics and drift, in a run of stale rollouts.
        outliers: Steps whose gap is far above that of all others.
        why: What the doctor found.
    """

    run: RunData
    level: str
    size: float | None
    worst_size: float | None
    drift: Parts | None
    outliers: Outliers | None
    why: Why | None


def findings_of(looked: Looked) -> list[Finding]:
    """Return all findings of a run, those that count first in front."""
    events = _events(looked)
    found = [
        *_confirmed(looked.why),
        *_penalty(looked.run),
        *_nothing_learned(looked.run),
        *_little_left(looked),
        *_meaningless(looked, came_late=_came_late(looked.run, events)),
        *events,
        *_size(looked),
    ]
    return sorted(found, key=lambda finding: finding.rank)


# The doctor, and the engine's settings.


def _confirmed(why: Why | None) -> Iterator[Finding]:
    if why is not None and why.confirmed:
        yield Finding(rank=Rank.CONFIRMED, advice=why.advice)


def _penalty(run: RunData) -> Iterator[Finding]:
    """Find a penalty with which the engine samples and which the trainer's policy does not have."""
    value = penalty_of(run)
    if value is not None:
        advice = (
            f"its engine applies repetition_penalty={value:g} and its trainer does not, so set it to 1 or leave it out"
        )
        yield Finding(rank=Rank.PENALTY, advice=advice)


def penalty_of(run: RunData) -> float | None:
    """Return the repetition penalty of a run's engine; None without one."""
    sampling = run.header.get("sampling")
    value = sampling.get("repetition_penalty") if isinstance(sampling, dict) else None
    if not isinstance(value, (int, float)) or value == 1:
        return None
    return value


# What is left of the update.


def _nothing_learned(run: RunData) -> Iterator[Finding]:
    """Repeat what the run said of an optimizer that changes nothing, unless it went on to change weights."""
    moved = kept_events(run, WEIGHTS_MOVING)
    for name, advice in NOT_TRAINING.items():
        events = kept_events(run, name)
        if not events or any(event.step > events[-1].step for event in moved):
            continue
        first = events[0]
        said = f"at step {first.step}: {first.message.rstrip('.')}"
        yield Finding(rank=Rank.UPDATE, said=said, advice=advice, step=first.step)


def _little_left(looked: Looked) -> Iterator[Finding]:
    """Find the step from which on importance weights leave little of the update, although the gap is small."""
    # Weights also correct for staleness, so that the whole gap counts.
    size = looked.worst_size if looked.drift is None else looked.drift.total
    if size is None or size >= HEALTHY_ABS_DIFF:
        return
    run = looked.run
    measure = CORRECTION_MEASURES["rollout_is_mean"]
    names = [PREFIX + "rollout_is_mean", measure.trl, measure.verl]
    name = next((name for name in names if run.column(name) is not None), names[0])
    steps, values = run.finite(name)
    weights = values.tolist()
    for at in range(len(weights) - PATIENCE + 1):
        low_at_first = max(weights[at : at + PATIENCE]) < LITTLE_LEFT
        if not low_at_first or median(weights[at:]) >= LITTLE_LEFT:
            continue
        rest = weights[at:]
        said = (
            f"from step {steps[at]} on the mean importance weight is below {LITTLE_LEFT:g} although the gap is small: the "
            f"weights leave {sum(rest) / len(rest):.0%} of the update, {rest[-1]:.0%} at the end"
        )
        advice = f"weigh tokens instead of whole responses ({_token_weights(run, name)})"
        yield Finding(rank=Rank.UPDATE, said=said, advice=advice, step=int(steps[at]))
        return


def _token_weights(run: RunData, name: str) -> str:
    """Return the setting of whoever weighs in this run, given the name under which it logs the mean weight."""
    if corrects(run) or name.startswith(PREFIX):
        return "mismatch.correction.preset: token_truncate"
    if name == CORRECTION_MEASURES["rollout_is_mean"].verl:
        return "algorithm.rollout_correction.rollout_is: token"
    return "vllm_importance_sampling_mode: token_truncate"


def corrects(run: RunData) -> bool:
    """Tell whether a `correction` section acted; the preset `disabled` does nothing unless another key overrides it."""
    keys = section(run, "correction")
    if keys is None:
        return False
    return {name: value for name, value in keys.items() if value is not None} != NO_CORRECTION


# What makes the size of the gap meaningless.


def _meaningless(looked: Looked, *, came_late: bool) -> Iterator[Finding]:
    """Name causes that make the size of the gap meaningless, the worst first.

    Dtypes that differ from the first step on are not the cause of what `came_late`.
    """
    run = looked.run
    failed = [event.step for event in run.events if event.name == WEIGHT_SYNC and event.level != "info"]
    if failed:
        yield _cause(f"the weight-sync check failed at step {failed[0]}, so fix the weight sync first")
    broken = sum(nonfinite(run, split) for split in run.splits)
    if broken:
        yield _cause(f"{broken} steps hold NaN or infinite mismatch metrics, so look at those first")
    stopped = pooled(run, "phantom_clip_frac") or 0.0
    if stopped > PHANTOM:
        yield _cause(
            f"its clip on π_trainer/π_engine stops {stopped:.0%} of the tokens although the policy has not changed since they "
            "were sampled, which the size of the gap does not tell, so clip on the trainer's own ratio "
            "(correction.preset: decoupled_token_is)"
        )
    trainer, engine = dtypes_of(run)
    if _differ(trainer, engine) and not came_late and beyond_rounding(looked) is None:
        yield _cause(f"its trainer computes in {trainer} and its engine in {engine}, so give both one dtype")
    if any((pooled(run, "support_truncated", split) or 0) > 0 for split in run.splits):
        yield _cause(
            f"{PREFIX}support_truncated is set, so switch top_p, top_k and min_p off for an unbiased ratio, or set "
            "mismatch.sampling_mask in TRL"
        )


def _cause(advice: str) -> Finding:
    return Finding(rank=Rank.MEANINGLESS, advice=advice)


def dtypes_of(run: RunData) -> tuple[str | None, str | None]:
    """Return the dtypes in which trainer and engine compute; None where that is unknown."""
    return side_dtype(run.header.get("trainer")), side_dtype(run.header.get("engine"))


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


def _differ(trainer: str | None, engine: str | None) -> bool:
    return trainer is not None and engine is not None and trainer != engine


def beyond_rounding(looked: Looked) -> float | None:
    """Return the gap of the weight check's probes, nats, if it is less than half of the run's; None if not, or if unknown."""
    probes = pooled(looked.run, "weight_sync_gap")
    if probes is None or looked.size is None:
        return None
    return probes if 2 * probes < looked.size else None


# What happened at some steps.


def _events(looked: Looked) -> list[Finding]:
    """Return what the mean over all steps hides: alarms, a rise, failed checks, bad rows, outlier steps."""
    run = looked.run
    found = _alarms(run, looked.level)
    rise = _rise(run)
    if rise is not None and not any(_tells(alarm, rise) for alarm in found):
        is_first = all(rise.step < alarm.step for alarm in found if alarm.advice)
        found.insert(0 if is_first else len(found), rise)
    found += _failed_checks(run)
    found += _bad_rows(run)
    if looked.outliers is not None:
        found.append(_outlier_steps(looked.outliers))
    return found


def _tells(alarm: Finding, rise: Finding) -> bool:
    """Tell whether an alarm that is still raised says what a rise would say."""
    return alarm.is_raised and alarm.advice is not None and alarm.step <= rise.step


def _failed_checks(run: RunData) -> Iterator[Finding]:
    for row in failed_checks(run):
        yield Finding(
            rank=Rank.EVENT,
            said=f"the check {row.check} failed {times(row.times)}, first at step {row.first_step}",
            advice='follow the failed checks, under "Checks"',
            step=row.first_step,
            about_gap=True,
        )


def _bad_rows(run: RunData) -> Iterator[Finding]:
    """Return what is said of the rows that were left out of the loss, and that they have ended the run if they have."""
    ended = too_many_bad_rows(run)
    if ended is not None:
        yield Finding(
            rank=Rank.EVENT,
            said=f"too many bad rows ended the run at step {ended.step}",
            advice='repair their cause, under "Bad rows"',
            step=ended.step,
            about_gap=True,
        )
    for row in bad_rows(run):
        were = "was" if row.rows == 1 else "were"
        yield Finding(
            rank=Rank.EVENT if ended is None else Rank.NOTE,
            said=f"{counted(row.rows, 'row')} {were} bad ({row.reason}), first at step {row.first_step}",
            advice='look at the bad rows, under "Bad rows"' if ended is None else None,
            step=row.first_step,
            about_gap=True,
        )


# Alarms.


def _alarms(run: RunData, level: str) -> list[Finding]:
    """Return the alarms that were raised, by metric and in the order of their first steps, but those of stale weights first."""
    histories: dict[str, list[EventRecord]] = {}
    for event in kept_events(run, ALARM):
        histories.setdefault(event.data["metric"], []).append(event)
    raised = [events for metric, events in histories.items() if not _is_warm_up(run, metric, events)]
    raised.sort(key=_order_of_alarm)
    found = [_alarm(run, events, level) for events in raised[:MAX_ALARMS]]
    more = len(raised) - MAX_ALARMS
    if more > 0:
        were = "alarm was" if more == 1 else "alarms were"
        found.append(Finding(rank=Rank.NOTE, said=f"{more} more {were} raised", about_gap=True))
    return found


def _order_of_alarm(events: Sequence[EventRecord]) -> tuple[bool, int]:
    first = events[0].data
    return first["threshold"] != STALE_ABS_DIFF, first["first_step"]


def _is_warm_up(run: RunData, metric: str, events: Sequence[EventRecord]) -> bool:
    """Tell whether an alarm is of the few first steps that float16 skips because the loss scale starts too high."""
    first, last = events[0].data, events[-1]
    if metric != run.names.of(Role.GRAD_NORM) or first["threshold"] is not None:
        return False
    raised_once = last.data["status"] == "cleared" and last.data["first_step"] == first["first_step"]
    if not raised_once or first["first_step"] != run.first_step:
        return False
    column = run.column(metric)
    if column is None:
        return True
    until = run.tables["train"].steps <= last.step
    return int((column.broken & until).sum()) <= SKIPPED


def _alarm(run: RunData, events: Sequence[EventRecord], level: str) -> Finding:
    """Return what an alarm says, from the data of its events; the built-in rule's text if it is that rule's."""
    first: Mapping[str, Any] = events[0].data
    last = events[-1]
    metric, step, threshold = first["metric"], first["first_step"], first["threshold"]
    is_over = last.data["status"] == "cleared"
    where = "not finite" if threshold is None else f"{first['side']} {threshold:g}"
    fact = f"{metric.removeprefix(PREFIX)} {where}"
    span = f"from step {step} to {last.step}" if is_over else f"from step {step} on"

    rule = built_in(metric, run.names)
    if rule is None or not _is_of_rule(threshold, rule.above, rule.below):
        advice = f"look at what else changed at step {step}"
        return Finding(rank=Rank.EVENT, said=f"{span} {fact}", advice=advice, step=step, about_gap=True)

    if rule.metric in GROWTH:
        # A log is out of bounds because of all those before it.
        span = f"by step {step}, and until step {last.step}," if is_over else f"by step {step}"
    said = f"{span} {rule.meaning}"
    if metric in run.logged("train"):
        said += f" ({fact})"
    of_k3 = metric if rule.numerics and threshold == HEALTHY_K3 else None
    # The level says the same, and its advice fits the run's dtypes.
    is_known = of_k3 is not None and level in (ELEVATED, CAUSED, LARGE)
    return Finding(
        rank=Rank.NOTE if is_known else Rank.EVENT,
        said=said,
        advice=None if is_known else rule.advised(replays(run)),
        step=step,
        about_gap=True,
        of_k3=of_k3,
        is_raised=rule.numerics and not is_over,
    )


def _is_of_rule(threshold: float | None, above: float | None, below: float | None) -> bool:
    """Tell whether an alarm was raised at a bound of this rule; without a threshold, by a rule on what is not finite alone."""
    if threshold is None:
        return above is None and below is None
    return threshold in (above, below)


# A rise.


def _rise(run: RunData) -> Finding | None:
    """Find where the end of the run left the level of the logs before."""
    prefix = PREFIX if parts(run) is None else PREFIX + NUMERICS
    estimated, least = "", SAME_ABS_DIFF
    steps, values = run.finite(prefix + ABS_DIFF_MEAN)
    sizes = values.tolist()
    if run.column(prefix + ABS_DIFF_MEAN) is None:
        estimated, least = ", estimated from k3", mean_of_k3(K3_ROUNDING)
        steps, values = run.finite(f"{prefix}k3_kl")
        sizes = [mean_of_k3(k3) for k3 in values.tolist()]
    change = change_point(sizes, least)
    if change is None:
        return None
    step = int(steps[change.index])
    return Finding(
        rank=Rank.EVENT,
        said=f"from step {step} on the gap has left the level of the steps before, mean |Δlogp| {quantity(change.after, 2)} "
        f"after {quantity(change.before, 2)}{estimated}",
        advice=f"look at the weight-sync check and at what else changed at step {step}",
        step=step,
        about_gap=True,
    )


def _came_late(run: RunData, events: Sequence[Finding]) -> bool:
    """Tell whether the first logs had nothing of what the first finding about the gap is about."""
    of_gap = [finding for finding in sorted(events, key=_order_of_warning) if finding.about_gap]
    if not of_gap or of_gap[0].step <= run.first_step:
        return False
    first = of_gap[0]
    if first.of_k3 is None:
        return True
    # k3 may have been a little below its limit: it must have been far smaller before.
    steps, k3 = run.finite(first.of_k3)
    sizes = [mean_of_k3(value) for value in k3.tolist()]
    before = [size for step, size in zip(steps, sizes, strict=True) if step < first.step]
    after = [size for step, size in zip(steps, sizes, strict=True) if step >= first.step]
    return bool(before and after) and median(after) > FAR_ABOVE * median(before)


def _order_of_warning(finding: Finding) -> Rank:
    return finding.rank


# Outlier steps.


@dataclass(frozen=True, kw_only=True)
class Outliers:
    """Steps whose gap is far above that of all others, with the figure that shows it."""

    steps: tuple[int, ...]
    figure: str
    largest: float
    median: float
    at_the_end: bool  # whether no usual steps follow, so that it may be the beginning of a collapse


def find_outliers(run: RunData) -> Outliers | None:
    """Find the few steps of training whose gap is far above the median; None without any, or if they are no exception."""
    prefix = PREFIX if parts(run) is None else PREFIX + NUMERICS
    # k3 grows with the square of the differences.
    figures = (
        ("mean |Δlogp|", ABS_DIFF_MEAN, SAME_ABS_DIFF, OUTLIER),
        ("k3", "k3_kl", max(K3_ROUNDING, SAME_ABS_DIFF**2), OUTLIER**2),
    )
    for figure, name, least, factor in figures:
        steps, values = run.finite(prefix + name)
        if len(values) < LEAST_STEPS:
            continue
        usual = median(values.tolist())
        beyond = values > max(least, usual * factor)
        if 0 < beyond.sum() <= max(1, len(values) // STEPS_PER_OUTLIER):
            return Outliers(
                steps=tuple(steps[beyond].tolist()),
                figure=figure,
                largest=float(values[beyond].max()),
                median=usual,
                at_the_end=bool(beyond[-PATIENCE:].any()),
            )
    return None


def _outlier_steps(found: Outliers) -> Finding:
    steps, size = named_steps(found.steps), f"{found.figure} {quantity(found.largest, 2)}"
    if found.at_the_end:
        what = f"{steps}, at the end of the log, may be where the run breaks: {size}"
    elif len(found.steps) == 1:
        what = f"{steps} is an outlier step: {size}"
    else:
        what = f"{steps} are outlier steps: up to {size}"
    return Finding(
        rank=Rank.EVENT,
        said=f"{what}, median {quantity(found.median, 2)} over all steps",
        advice=f"look at the batch of {steps}, where few tokens may carry the whole gap",
        step=found.steps[0],
    )


def named_steps(steps: Sequence[int]) -> str:
    """Write one step or several: "step 3", "steps 3 and 5"."""
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {joined([str(step) for step in steps])}"


# The size of the gap.


def _size(looked: Looked) -> Iterator[Finding]:
    """Say what the doctor found; without it, send a gap that dtypes do not explain to the doctor."""
    if looked.why is not None:
        if looked.why.advice is not None:
            yield Finding(rank=Rank.SIZE, advice=looked.why.advice)
        return
    probes = beyond_rounding(looked)
    if probes is None:
        return
    trainer, engine = dtypes_of(looked.run)
    if _differ(trainer, engine):
        explains = f"its trainer computes in {trainer} and its engine in {engine}, which explains"
    elif looked.level in (ELEVATED, LARGE):
        explains = "rounding explains"
    else:
        return
    yield Finding(
        rank=Rank.SIZE,
        advice=f"{explains} {quantity(probes, 2)} of it, as the weight check's probes show, so ask mismatch-ext doctor for the "
        "rest",
    )
