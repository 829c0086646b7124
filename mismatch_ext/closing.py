"""The summary printed when training ends: what was measured, and what happened, one line for each recorded topic."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mismatch_ext.alarms import STALENESS
from mismatch_ext.events import (
    ALARM,
    BAD_ROWS,
    CHECK_FAILED,
    EVIDENCE,
    NOTHING_TRAINED,
    SYNC_UNANSWERED,
    WEIGHT_SYNC,
    WEIGHTS_STILL,
    WEIGHTS_UNVERIFIED,
)
from mismatch_ext.log_reading import METRICS_FILES, EventRecord, RunData
from mismatch_ext.names import MEASURES, PREFIX
from mismatch_ext.pooling import ABS_DIFF_MEAN, NUMERICS, replay_k3
from mismatch_ext.words import counted, quantity, times

STATUS = {"completed": "completed", "failed": "failed", "interrupted": "was interrupted", "open": "did not end"}
WIDTH = 10
"""Columns of a topic's name."""


def closing_lines(run: RunData) -> list[str]:
    """Return the summary of a run over all its segments."""
    lines = [_status(run)]
    for topic, said in TOPICS.items():
        for at, text in enumerate(said(run)):
            name = topic if at == 0 else ""
            lines.append(f"  {name:<{WIDTH}} {text}")
    return lines


def _status(run: RunData) -> str:
    end = run.ending
    how = "was stopped" if end.status == "completed" and end.message else STATUS[end.status]
    last_step = max([run.last_step, *(each.step for each in run.ends)])
    text = f"mismatch-ext: {end.of} {how} after {counted(last_step, 'step')}"
    resumed = [str(header["resume_step"]) for header in run.resumes]
    if resumed:
        text += f", resumed from {'step' if len(resumed) == 1 else 'steps'} {', '.join(resumed)}"
    if end.message and end.status != "interrupted":
        text += f": {end.message}"
    return text


# What happened, for these lines and for the report.


@dataclass(frozen=True, kw_only=True)
class FailedTimes:
    """How often a check failed in a run that went on; `times` is a lower bound, because not every failure is written."""

    check: str
    first_step: int
    times: int
    message: str


@dataclass(frozen=True, kw_only=True)
class BadRowsOf:
    """How many rows were bad for a reason, with the message of the first time."""

    reason: str
    rows: int
    first_step: int
    message: str


def only_measured(run: RunData) -> bool:
    """Tell whether a run's config neither changed its training nor could end it."""
    return run.header.get("acts") is False


def section(run: RunData, name: str) -> Mapping[str, Any] | None:
    """Return a section of a run's config; None without it."""
    config = run.header.get("config")
    keys = config.get(name) if isinstance(config, Mapping) else None
    return keys if isinstance(keys, Mapping) else None


def replays(run: RunData) -> bool:
    """Tell whether a run's trainer replayed the engine's routes."""
    routing = section(run, "routing")
    return routing is not None and routing.get("mode") == "R3"


def kept_events(run: RunData, name: str) -> list[EventRecord]:
    """Return the events of a name, without those of steps that a later segment did again from an earlier checkpoint."""
    resumes = [(header["segment"], header["resume_step"]) for header in run.resumes]

    def was_done_again(event: EventRecord) -> bool:
        return any(event.segment < segment and event.step > step for segment, step in resumes)

    return [event for event in run.events if event.name == name and not was_done_again(event)]


def failed_checks(run: RunData) -> list[FailedTimes]:
    """Return the checks that failed in a run that went on, in the order of their first steps."""
    by_check: dict[str, list[EventRecord]] = {}
    for event in run.events:
        if event.name == CHECK_FAILED:
            by_check.setdefault(event.data["check"], []).append(event)
    failed = [
        FailedTimes(
            check=check,
            first_step=events[0].step,
            times=max(event.data["count"] for event in events),
            message=events[0].data["message"],
        )
        for check, events in by_check.items()
    ]
    return sorted(failed, key=lambda each: each.first_step)


def bad_rows(run: RunData) -> list[BadRowsOf]:
    """Return the bad rows of a run by reason, in the order of their first steps."""
    by_reason: dict[str, list[EventRecord]] = {}
    for event in kept_events(run, BAD_ROWS):
        if event.data["reason"] is not None:
            by_reason.setdefault(event.data["reason"], []).append(event)
    found = [
        BadRowsOf(
            reason=reason,
            rows=sum(event.data["rows"] for event in events),
            first_step=events[0].step,
            message=events[0].message,
        )
        for reason, events in by_reason.items()
    ]
    return sorted(found, key=lambda each: each.first_step)


def too_many_bad_rows(run: RunData) -> EventRecord | None:
    """Return the event that says that bad rows have ended the run; None if they have not."""
    ended = [event for event in kept_events(run, BAD_ROWS) if event.data["reason"] is None]
    return ended[-1] if ended else None


# The lines, by topic.


def _failed_checks(run: RunData) -> list[str]:
    lines = [f"{row.check}: failed {times(row.times)}, first at step {row.first_step}" for row in failed_checks(run)]
    if not lines and only_measured(run):
        return ["none failed"]
    return lines


def _bad_rows(run: RunData) -> list[str]:
    lines = [f"{row.reason}: {counted(row.rows, 'row')}, first at step {row.first_step}" for row in bad_rows(run)]
    ended = too_many_bad_rows(run)
    if ended is not None:
        lines.append(f"ended the run at step {ended.step}")
    return lines


def _gap(run: RunData) -> list[str]:
    lines: list[str | None] = []
    if run.column(STALENESS) is not None:
        label = "k3 of numerics alone"
        numerics = _from_to(run, label, PREFIX + NUMERICS + "k3_kl")
        lines.append(numerics or f"{label} is unknown: no token of one version")
    lines.append(_from_to(run, "k3", PREFIX + "k3_kl"))
    # TRL measures its own mean without a config.
    mean = _from_to(run, "mean |Δlogp|", PREFIX + ABS_DIFF_MEAN)
    lines.append(mean or _from_to(run, "mean |Δlogp|", MEASURES[ABS_DIFF_MEAN].trl))
    return [line for line in lines if line is not None]


def _from_to(run: RunData, label: str, metric: str) -> str | None:
    """Return the first, the last and the worst value of a metric of the gap; None if it was not logged."""
    column = run.column(metric)
    if column is None:
        return None
    broken = int(column.broken.sum())
    steps, values = run.finite(metric)
    if not len(values):
        return f"{label} was not finite in any of {counted(broken, 'log')}"
    worst = int(values.argmax())
    text = f"{label} {quantity(values[0])} -> {quantity(values[-1])} nats per token, "
    text += f"worst {quantity(values[worst])} at step {steps[worst]}"
    if broken:
        text += f", not finite in {counted(broken, 'log')}"
    return text


def _alarms(run: RunData) -> list[str]:
    histories: dict[str, list[EventRecord]] = {}
    for event in kept_events(run, ALARM):
        histories.setdefault(event.data["metric"], []).append(event)
    lines = []
    for metric, events in histories.items():
        raised = [event.step for event in events if event.data["status"] == "raised"]
        text = f"raised {times(len(raised))}, {_first_and_last(raised)}, " if raised else ""
        last = events[-1]
        now = "still raised" if last.data["status"] == "raised" else f"cleared at step {last.step}"
        lines.append(f"{metric}: {text}{now}")
    return lines


def _untrained(run: RunData) -> list[str]:
    """Return what the run said of an optimizer that changes nothing."""
    lines = []
    for name in (NOTHING_TRAINED, WEIGHTS_STILL):
        events = kept_events(run, name)
        if events:
            lines.append(f"at step {events[0].step}: {events[0].message}")
    return lines


def _evidence(run: RunData) -> list[str]:
    """Return a command for each file of rows that the run has kept, the last one that was said: it names the checkpoint."""
    commands: dict[str, str] = {}
    for event in kept_events(run, EVIDENCE):
        if "command" in event.data:
            commands[str(event.data["path"])] = str(event.data["command"])
    return list(commands.values())


def _problems(run: RunData) -> list[str]:
    if not run.problems:
        return []
    return [f"{len(run.problems)}, the first: {run.problems[0]}"]


def _values(run: RunData, name: str) -> list[float]:
    """Return the finite values of one of our metrics."""
    _, values = run.finite(PREFIX + name)
    return [float(value) for value in values]


def _kl(run: RunData) -> list[str]:
    k1, coefs = _values(run, "kl_ref_k1"), _values(run, "kl_coef")
    if not k1 or not coefs:
        return []
    text = f"{quantity(k1[0])} -> {quantity(k1[-1])} nats per token from the reference (k1)"
    target = (section(run, "kl") or {}).get("target_kl")
    if target is not None:
        text += f", target {quantity(target)}"
    coef = quantity(coefs[-1]) if coefs[0] == coefs[-1] else f"{quantity(coefs[0])} -> {quantity(coefs[-1])}"
    return [f"{text}, coefficient {coef}"]


def _learning_rate(run: RunData) -> list[str]:
    multipliers, surges = _values(run, "lr_multiplier"), _values(run, "lr_surge_step")
    if not multipliers:
        return []
    at = f", surge at step {surges[-1]:.0f}" if surges else ""
    return [f"multiplier {multipliers[-1]:g} at the end{at}"]


def _loss_scale(run: RunData) -> list[str]:
    scales, skipped = _values(run, "loss_scale"), _values(run, "overflow_steps")
    if not scales:
        return []
    steps = f", {counted(round(skipped[-1]), 'step')} skipped" if skipped else ""
    return [f"{scales[-1]:g} at the end{steps}"]


def _weight_sync(run: RunData) -> list[str]:
    if kept_events(run, WEIGHTS_UNVERIFIED):
        return ["the engine's weights were not verified"]
    events = kept_events(run, WEIGHT_SYNC)
    if not events and run.column(PREFIX + "weight_sync_gap") is None:
        return []
    failed = [event.step for event in events if event.level != "info"]
    verified = len(events) - len(failed)
    gaps = _values(run, "weight_sync_gap")
    facts = []
    if verified:
        facts.append(f"{counted(verified, 'weight update')} verified")
    if gaps:
        facts.append(f"gap of the probes at most {quantity(max(gaps))}")
    facts.append(f"{len(failed)} failed, {_first_and_last(failed)}" if failed else "no weight update failed")
    # Each rank and each server says so of one update.
    unknown = sorted({event.step for event in kept_events(run, SYNC_UNANSWERED)})
    if unknown:
        facts.append(f"{len(unknown)} unknown, {_first_and_last(unknown)}")
    return [", ".join(facts)]


def _routing(run: RunData) -> list[str]:
    flips = _values(run, "routing/set_mismatch_frac")
    if not flips:
        return []
    return [f"other experts in {flips[-1]:.2%} of (token, layer) pairs at the end, at most {max(flips):.2%}"]


def _replay(run: RunData) -> list[str]:
    k3 = replay_k3(run)
    return [] if k3 is None else [f"k3 {quantity(k3[0])} without, {quantity(k3[1])} with"]


def _first_and_last(steps: Sequence[int]) -> str:
    return f"at step {steps[0]}" if len(steps) == 1 else f"first at step {steps[0]}, last at step {steps[-1]}"


def _files(run: RunData) -> list[str]:
    return [str(run.path / METRICS_FILES)]


def _report(run: RunData) -> list[str]:
    return [f"mismatch-ext report {shlex.quote(str(run.path))}"]


TOPICS: dict[str, Callable[[RunData], list[str]]] = {
    "checks": _failed_checks,
    "bad rows": _bad_rows,
    "gap": _gap,
    "alarms": _alarms,
    "warning": _untrained,
    "kl": _kl,
    "lr": _learning_rate,
    "loss scale": _loss_scale,
    "sync": _weight_sync,
    "routing": _routing,
    "replay": _replay,
    "evidence": _evidence,
    "problems": _problems,
    "metrics": _files,
    "report": _report,
}
"""What the lines of each topic are, in their order."""
