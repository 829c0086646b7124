"""The summary printed when training ends: what was measured, and what happened."""

from __future__ import annotations

import difflib
import math
import shlex
from collections.abc import Iterable

from mismatch_ext.alarms import STALENESS, logged_names
from mismatch_ext.host_names import PREFIX
from mismatch_ext.log_reading import METRICS_FILE, EventRecord, RunData
from mismatch_ext.metrics.names import MEASURES
from mismatch_ext.report.observed import level_of_run, observed
from mismatch_ext.report.summary import ABS_DIFF_MEAN, NUMERICS, quantity

ALARM_EVENT = "alarm"
# Used if our own metric is not logged: TRL measures this one without a block.
HOST_ABS_DIFF = MEASURES[ABS_DIFF_MEAN].trl


def closing_lines(run: RunData) -> list[str]:
    """Return the summary of a run over all its segments, one line for each recorded topic.

    Args:
        run: The run, from `mismatch_ext.log_reading.read_run`.
    """
    lines = [_status(run), *_observed(run)]
    lines += _gap(run) + _alarms(run) + _unwatched(run) + _learning_rate(run) + _loss_scale(run)
    lines += _weight_sync(run) + _routing(run)
    if run.problems:
        lines.append(_line("problems", f"{len(run.problems)}, the first: {run.problems[0]}"))
    lines.append(_line("metrics", str(run.path / METRICS_FILE)))
    lines.append(_line("report", f"mismatch-ext report {shlex.quote(str(run.path))}"))
    return lines


def _line(name: str, text: str) -> str:
    return f"  {name:<10} {text}"


def _status(run: RunData) -> str:
    status, what, why = run.ending.status, run.ending.of, run.ending.message
    said = {"completed": "was stopped" if why else "completed", "failed": "failed", "open": "did not end"}[status]
    last = max([run.last_step] + [end.step for end in run.ends])
    text = f"mismatch-ext: {what} {said} after {_count(last, 'step')}"
    resumed = [header["resume_step"] for header in run.headers if isinstance(header.get("resume_step"), int)]
    if resumed:
        text += f", resumed from {'step' if len(resumed) == 1 else 'steps'} {', '.join(map(str, resumed))}"
    return f"{text}: {why}" if why else text


def _observed(run: RunData) -> list[str]:
    """Name the checks that failed in a run that only observed."""
    if level_of_run(run) != "observe":
        return []
    found = observed(run)
    if not found:
        return [_line("observed", "no check failed")]
    lines: list[str] = []
    for one in found:
        failed = f"{one.check}: failed {_times(one.times)}, first at step {one.first_step}"
        lines.append(_line("" if lines else "observed", failed))
    return lines


def _gap(run: RunData) -> list[str]:
    lines: list[str] = []
    shown: list[tuple[str, tuple[str, ...]]] = [
        ("k3", (PREFIX + "k3_kl",)),
        ("mean |Δlogp|", (PREFIX + ABS_DIFF_MEAN, HOST_ABS_DIFF)),
    ]
    if run.series(STALENESS)[0]:
        shown.insert(0, ("k3 of numerics alone", (f"{PREFIX}{NUMERICS}k3_kl",)))
    for label, names in shown:
        name = next((n for n in names if run.series(n)[0]), None)
        if name is None:
            if NUMERICS in names[0]:
                lines.append(_line("gap" if not lines else "", f"{label} is unknown: no token of one version"))
            continue
        steps, values = run.series(name)
        known = [(value, step) for step, value in zip(steps, values, strict=True) if value is not None]
        broken = values.count(None)
        text = f"{label} was not finite"
        if known:
            worst, at = max(known, key=lambda pair: pair[0])
            text = f"{label} {quantity(known[0][0])} -> {quantity(known[-1][0])} nat per token, "
            text += f"worst {quantity(worst)} at step {at}"
        if broken:
            text += f", not finite in {_count(broken, 'log')}" if known else f" in any of {_count(broken, 'log')}"
        lines.append(_line("gap" if not lines else "", text))
    return lines


def _alarms(run: RunData) -> list[str]:
    histories: dict[str, list[EventRecord]] = {}
    for event in _kept(run, ALARM_EVENT):
        if isinstance(event.data, dict) and isinstance(event.data.get("metric"), str):
            histories.setdefault(event.data["metric"], []).append(event)
    lines: list[str] = []
    for metric, events in histories.items():
        raised = [e for e in events if e.data.get("status") == "raised"]
        ends = [e for e in events if e.data.get("status") in ("raised", "cleared")]
        parts = []
        if raised:
            parts.append(f"raised {_times(len(raised))}, {_first_and_last(e.step for e in raised)}")
        if ends:
            last = ends[-1]
            parts.append("still raised" if last.data["status"] == "raised" else f"cleared at step {last.step}")
        if parts:
            lines.append(_line("" if lines else "alarms", f"{metric}: {', '.join(parts)}"))
    return lines


def _kept(run: RunData, name: str) -> list[EventRecord]:
    """Return the events of a name, without those of steps that a later segment did again from an earlier checkpoint."""
    resumes = [(h["segment"], h["resume_step"]) for h in run.headers if isinstance(h.get("resume_step"), int)]
    return [
        event
        for event in run.events
        if event.name == name and not any(event.segment < s and event.step > at for s, at in resumes)
    ]


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _first_and_last(steps: Iterable[int]) -> str:
    found = list(steps)
    return f"at step {found[0]}" if len(found) == 1 else f"first at step {found[0]}, last at step {found[-1]}"


def _unwatched(run: RunData) -> list[str]:
    """Name the metrics that the block watches but no log holds: an alarm on a misspelt name never fires."""
    config = run.header.get("config")
    monitor = config.get("monitor") if isinstance(config, dict) else None
    alarms = monitor.get("alarms") if isinstance(monitor, dict) else None
    logged = run.logged("train")
    if not isinstance(alarms, dict) or not logged:
        return []
    lines = []
    for metric, alarm in alarms.items():
        off = isinstance(alarm, dict) and alarm.get("action") == "off"
        if off or any(name in logged for name in logged_names(metric, run.names)):
            continue
        short = [name.removeprefix(PREFIX) for name in sorted(logged)]
        near = difflib.get_close_matches(metric.removeprefix(PREFIX), short, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        lines.append(_line("unwatched", f"{metric}: no log held this metric{hint}"))
    return lines


def _last(run: RunData, name: str) -> float | None:
    values = [value for value in run.series(PREFIX + name)[1] if value is not None]
    return values[-1] if values else None


def _learning_rate(run: RunData) -> list[str]:
    multiplier, surge = _last(run, "lr_multiplier"), _last(run, "lr_surge_step")
    if multiplier is None:
        return []
    text = f"multiplier {multiplier:g} at the end"
    if surge is not None and math.isfinite(surge):
        text += f", surge at step {surge:.0f}"
    return [_line("lr", text)]


def _loss_scale(run: RunData) -> list[str]:
    scale, skipped = _last(run, "loss_scale"), _last(run, "overflow_steps")
    if scale is None:
        return []
    text = f"{scale:g} at the end"
    if skipped is not None:
        text += f", {_count(round(skipped), 'step')} skipped"
    return [_line("loss scale", text)]


def _weight_sync(run: RunData) -> list[str]:
    steps, values = run.series(PREFIX + "weight_sync_gap")
    events = _kept(run, "weight_sync")
    failed = [event.step for event in events if event.level != "info"]
    verified = [event for event in events if event.level == "info"]
    if _kept(run, "weights_unverified"):
        return [_line("sync", "the engine's weights were not verified")]
    if not steps and not events:
        return []
    parts = []
    if verified:
        parts.append(f"{_count(len(verified), 'weight update')} verified")
    known = [value for value in values if value is not None]
    if known:
        parts.append(f"gap of the probes at most {quantity(max(known))}")
    count = "no weight update failed" if not failed else f"{len(failed)} failed, {_first_and_last(failed)}"
    return [_line("sync", ", ".join([*parts, count]))]


def _routing(run: RunData) -> list[str]:
    values = [v for v in run.series(PREFIX + "routing/set_mismatch_frac")[1] if v is not None]
    if not values:
        return []
    return [
        _line(
            "routing",
            f"other experts in {values[-1]:.2%} of (token, layer) pairs at the end, at most {max(values):.2%}",
        )
    ]
