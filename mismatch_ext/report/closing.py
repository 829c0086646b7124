"""The summary printed when training ends: what was measured, and what happened, one line for each recorded topic."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mismatch_ext.alarms import STALENESS
from mismatch_ext.bad_rows import EVENT as BAD_ROWS
from mismatch_ext.checks import EVENT
from mismatch_ext.evidence import EVENT as EVIDENCE
from mismatch_ext.log_reading import METRICS_FILE, EventRecord, RunData
from mismatch_ext.names import MEASURES, PREFIX
from mismatch_ext.report.summary import ABS_DIFF_MEAN, NUMERICS, quantity, replay_k3
from mismatch_ext.weights import STILL_EVENT, UNANSWERED_EVENT, UNTRAINED_EVENT

STATUS = {"completed": "completed", "failed": "failed", "interrupted": "was interrupted", "open": "did not end"}


def closing_lines(run: RunData) -> list[str]:
    """Return the summary of a run over all its segments."""
    rows = [
        *(("checks", text) for text in _failed_checks(run)),
        *(("bad rows", text) for text in _bad_rows(run)),
        *(("gap", text) for text in _gap(run)),
        *(("alarms", text) for text in _alarms(run)),
        *(("warning", text) for text in _untrained(run)),
        *_parts(run),
        *(("evidence", text) for text in _evidence(run)),
    ]
    if run.problems:
        rows.append(("problems", f"{len(run.problems)}, the first: {run.problems[0]}"))
    rows.append(("metrics", str(run.path / METRICS_FILE)))
    rows.append(("report", f"mismatch-ext report {shlex.quote(str(run.path))}"))
    names = ["" if at and name == rows[at - 1][0] else name for at, (name, _) in enumerate(rows)]
    return [_status(run), *(f"  {name:<10} {text}" for name, (_, text) in zip(names, rows, strict=True))]


def _status(run: RunData) -> str:
    end = run.ending
    how = "was stopped" if end.status == "completed" and end.message else STATUS[end.status]
    text = f"mismatch-ext: {end.of} {how} after {_count(max([run.last_step, *(e.step for e in run.ends)]), 'step')}"
    resumed = [str(header["resume_step"]) for header in run.resumes]
    if resumed:
        text += f", resumed from {'step' if len(resumed) == 1 else 'steps'} {', '.join(resumed)}"
    return f"{text}: {end.message}" if end.message and end.status != "interrupted" else text


@dataclass(frozen=True, kw_only=True)
class FailedTimes:
    """How often a check failed in a run that went on; `times` is a lower bound, because not every failure is written."""

    check: str
    first_step: int
    times: int
    message: str


def only_measured(run: RunData) -> bool:
    """Tell whether a run's config neither changed its training nor could end it."""
    return run.header.get("acts") is False


def section(run: RunData, name: str) -> Mapping[str, Any] | None:
    """Return a section of a run's config; None without it."""
    block = run.header.get("config")
    keys = block.get(name) if isinstance(block, Mapping) else None
    return keys if isinstance(keys, Mapping) else None


def replays(run: RunData) -> bool:
    """Tell whether a run's trainer replayed the engine's routes."""
    return (section(run, "routing") or {}).get("mode") == "R3"


def failed_checks(run: RunData) -> list[FailedTimes]:
    """Return the checks that failed in a run that went on, in the order of their first steps."""
    checks: dict[str, list[EventRecord]] = {}
    for event in run.events:
        if event.name == EVENT:
            checks.setdefault(event.data["check"], []).append(event)
    rows = [
        FailedTimes(
            check=check,
            first_step=events[0].step,
            times=max(event.data["count"] for event in events),
            message=events[0].data["message"],
        )
        for check, events in checks.items()
    ]
    return sorted(rows, key=lambda row: row.first_step)


@dataclass(frozen=True, kw_only=True)
class BadRowsOf:
    """How many rows were bad for a reason, with the message of the first time."""

    reason: str
    rows: int
    first_step: int
    message: str


def bad_rows(run: RunData) -> list[BadRowsOf]:
    """Return the bad rows of a run by reason, in the order of their first steps."""
    reasons: dict[str, list[EventRecord]] = {}
    for event in kept_events(run, BAD_ROWS):
        if event.data["reason"] is not None:
            reasons.setdefault(event.data["reason"], []).append(event)
    found = [
        BadRowsOf(
            reason=reason,
            rows=sum(event.data["rows"] for event in events),
            first_step=events[0].step,
            message=events[0].message,
        )
        for reason, events in reasons.items()
    ]
    return sorted(found, key=lambda of_reason: of_reason.first_step)


def too_many_bad_rows(run: RunData) -> EventRecord | None:
    """Return the event that says that bad rows have ended the run; None if they have not."""
    ended = [event for event in kept_events(run, BAD_ROWS) if event.data["reason"] is None]
    return ended[-1] if ended else None


def _bad_rows(run: RunData) -> list[str]:
    lines = [f"{row.reason}: {_count(row.rows, 'row')}, first at step {row.first_step}" for row in bad_rows(run)]
    ended = too_many_bad_rows(run)
    if ended is not None:
        lines.append(f"ended the run at step {ended.step}")
    return lines


def _failed_checks(run: RunData) -> list[str]:
    lines = [f"{row.check}: failed {times(row.times)}, first at step {row.first_step}" for row in failed_checks(run)]
    return lines or ["none failed"] * only_measured(run)


def _gap(run: RunData) -> list[str]:
    # TRL measures its own mean without a block.
    shown = [("k3", [PREFIX + "k3_kl"]), ("mean |Δlogp|", [PREFIX + ABS_DIFF_MEAN, MEASURES[ABS_DIFF_MEAN].trl])]
    if run.series(STALENESS)[0]:
        shown.insert(0, ("k3 of numerics alone", [f"{PREFIX}{NUMERICS}k3_kl"]))
    lines = []
    for label, names in shown:
        steps, values = next((series for name in names if (series := run.series(name))[0]), ([], []))
        known = [(value, step) for step, value in zip(steps, values, strict=True) if value is not None]
        broken = _count(values.count(None), "log")
        if known:
            worst, at = max(known, key=lambda pair: pair[0])
            text = f"{label} {quantity(known[0][0])} -> {quantity(known[-1][0])} nat per token, "
            text += f"worst {quantity(worst)} at step {at}"
            lines.append(f"{text}, not finite in {broken}" if None in values else text)
        elif values:
            lines.append(f"{label} was not finite in any of {broken}")
        elif NUMERICS in names[0]:
            lines.append(f"{label} is unknown: no token of one version")
    return lines


def _alarms(run: RunData) -> list[str]:
    histories: dict[str, list[tuple[str, int]]] = {}
    for event in kept_events(run, "alarm"):
        histories.setdefault(event.data["metric"], []).append((event.data["status"], event.step))
    lines = []
    for metric, history in histories.items():
        raised = [step for status, step in history if status == "raised"]
        text = f"raised {times(len(raised))}, {_first_and_last(raised)}, " if raised else ""
        status, step = history[-1]
        lines.append(f"{metric}: {text}{'still raised' if status == 'raised' else f'cleared at step {step}'}")
    return lines


def _evidence(run: RunData) -> list[str]:
    """Return a command for each file of rows that the run has kept, the last one that was said: it names the checkpoint."""
    commands: dict[str, str] = {}
    for event in kept_events(run, EVIDENCE):
        if "command" in event.data:
            commands[str(event.data["path"])] = str(event.data["command"])
    return list(commands.values())


def _untrained(run: RunData) -> list[str]:
    """Return what the run said of an optimizer that changes nothing."""
    first = [events[0] for name in (UNTRAINED_EVENT, STILL_EVENT) if (events := kept_events(run, name))]
    return [f"at step {event.step}: {event.message}" for event in first]


def kept_events(run: RunData, name: str) -> list[EventRecord]:
    """Return the events of a name, without those of steps that a later segment did again from an earlier checkpoint."""
    resumes = [(header["segment"], header["resume_step"]) for header in run.resumes]
    return [
        event
        for event in run.events
        if event.name == name and not any(event.segment < s and event.step > at for s, at in resumes)
    ]


def _parts(run: RunData) -> list[tuple[str, str]]:
    """Return the lines about KL, learning rate, loss scale, weight sync and routing, as far as they were logged."""

    def values(name: str) -> list[float]:
        return [value for value in run.series(PREFIX + name)[1] if value is not None]

    rows = []
    if (k1 := values("kl_ref_k1")) and (coefs := values("kl_coef")):
        target = (section(run, "kl") or {}).get("target_kl")
        aim = "" if target is None else f", target {quantity(target)}"
        coef = quantity(coefs[-1]) if coefs[0] == coefs[-1] else f"{quantity(coefs[0])} -> {quantity(coefs[-1])}"
        moved = f"{quantity(k1[0])} -> {quantity(k1[-1])} nat per token from the reference (k1){aim}"
        rows.append(("kl", f"{moved}, coefficient {coef}"))
    if multiplier := values("lr_multiplier"):
        surge = values("lr_surge_step")
        at = f", surge at step {surge[-1]:.0f}" if surge and math.isfinite(surge[-1]) else ""
        rows.append(("lr", f"multiplier {multiplier[-1]:g} at the end{at}"))
    if scale := values("loss_scale"):
        skipped = values("overflow_steps")
        steps = f", {_count(round(skipped[-1]), 'step')} skipped" if skipped else ""
        rows.append(("loss scale", f"{scale[-1]:g} at the end{steps}"))
    if kept_events(run, "weights_unverified"):
        rows.append(("sync", "the engine's weights were not verified"))
    elif (events := kept_events(run, "weight_sync")) or run.series(PREFIX + "weight_sync_gap")[0]:
        failed = [event.step for event in events if event.level != "info"]
        gaps, verified = values("weight_sync_gap"), len(events) - len(failed)
        parts = [f"{_count(verified, 'weight update')} verified"] if verified else []
        parts += [f"gap of the probes at most {quantity(max(gaps))}"] if gaps else []
        parts.append(f"{len(failed)} failed, {_first_and_last(failed)}" if failed else "no weight update failed")
        # Each rank and each server says so of one update.
        unknown = sorted({event.step for event in kept_events(run, UNANSWERED_EVENT)})
        if unknown:
            parts.append(f"{len(unknown)} unknown, {_first_and_last(unknown)}")
        rows.append(("sync", ", ".join(parts)))
    if flips := values("routing/set_mismatch_frac"):
        share = f"{flips[-1]:.2%} of (token, layer) pairs at the end, at most {max(flips):.2%}"
        rows.append(("routing", f"other experts in {share}"))
    if (k3 := replay_k3(run)) is not None:
        rows.append(("replay", f"k3 {quantity(k3[0])} without, {quantity(k3[1])} with"))
    return rows


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _first_and_last(steps: Sequence[int]) -> str:
    return f"at step {steps[0]}" if len(steps) == 1 else f"first at step {steps[0]}, last at step {steps[-1]}"
