"""Finds the runs at a path, and reads logs that trainers write without this package.

These are `trainer_state.json`, verl's jsonl, TensorBoard's event files, and what `pasted.py` reads. Figures that names.toml knows
under the host's name become this package's. The built-in alarms and the growth of the gap are computed from them, as during a run
with this package.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mismatch_ext.alarms import AlarmState, rules_of, watch
from mismatch_ext.errors import PeerVersionError, RunDirectoryError, shown
from mismatch_ext.events import ALARM
from mismatch_ext.growth import GROWTH_FLOOR, Growth, grown
from mismatch_ext.log_reading import METRICS_FILES, EventRecord, RunData, StepRecord, is_ours, read_run, run_of
from mismatch_ext.names import EVALUATION, HOSTS, MEASURES, OTHER_LOGS, PREFIX, VERL, HostNames, Role
from mismatch_ext.pasted import of_console, of_wandb

TRAINER_STATE = "trainer_state.json"
EVENTS = "events.out.tfevents.*"
CENTRAL = ("logp_abs_diff_mean", "k3_kl", "ess_seq")
"""The figures of the gap that the report's verdict and first table are about."""
MEASURE = {"TRL": "mismatch_ext.adapters.trl.attach(trainer)", "verl": "+mismatch={}"}
"""What makes this package log all of them, and changes nothing."""
GIVE = (
    f"give a folder that holds {METRICS_FILES} (`mismatch.monitor.run_dir`, by default `mismatch` in the output folder), "
    f"a log without this package ({TRAINER_STATE}, verl's jsonl, TensorBoard's event files, W&B's CSV, or the console text of "
    "TRL, verl, slime or prime-rl), or a folder of such folders."
)


MAX_STEP = 2**53
"""Readers in other languages keep no larger integer exactly."""


def _names_in(host: str) -> dict[str, str]:
    """Return the names of a host's own figures that become ours, or a role's where the host has no adapter."""
    column = host.lower()
    known = {getattr(measure, column): PREFIX + name for name, measure in MEASURES.items()} if host in HOSTS else {}
    known.pop("", None)
    return known or OTHER_LOGS[host]


OURS = {host: _names_in(host) for host in (*HOSTS, *OTHER_LOGS)}
_ROLES = {host: frozenset(names.of(role) for role in Role) for host, names in HOSTS.items()}
READ = {host: names.keys() | _ROLES.get(host, frozenset()) for host, names in OURS.items()}
"""Names of a host's own metrics that the report reads; its log may have others, which need not be numbers."""


def _host_of(names: Iterable[str]) -> str:
    """Return the host that logs these names: the one that has the most of them, TRL if none has more."""
    given = set(names)
    return max(READ, key=lambda host: len(READ[host] & given))


@dataclass
class _Rows:
    """Lines of a host's log: step, split and metrics, with None for a value that was not finite."""

    host: str
    rows: list[tuple[int, str, dict[str, float | None]]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @staticmethod
    def of(host: str, rows: Iterable[tuple[str, int, str, dict[str, float]]]) -> _Rows:
        """Return these rows, each with its place in the log."""
        read = _Rows(host)
        for row in rows:
            read.add(*row)
        return read

    def add(self, where: str, step: Any, split: str, metrics: Any) -> None:
        """Add the metrics of a step, or say what of it could not be used; `where` names its place in the log."""
        if type(step) is not int or not 0 <= step <= MAX_STEP:
            self.problems.append(f"{where} was left out: step {shown(step)} is not a whole number of at least 0.")
            return
        if not isinstance(metrics, Mapping):
            self.problems.append(f"{where} was left out: {shown(metrics)} is not a mapping of metrics.")
            return
        values = {}
        for name, value in metrics.items():
            if value is None or type(value) in (int, float):
                try:
                    values[name] = None if value is None or not math.isfinite(value) else float(value)
                except OverflowError:
                    self.problems.append(f"{where}: {name} was left out: a whole number of {len(str(value))} digits.")
            elif name in READ[self.host]:
                self.problems.append(f"{where}: {name} was left out: {shown(value)} is not a number.")
        self.rows.append((step, split, values))


def read_runs(directory: str | Path) -> dict[str, RunData]:
    """Read the runs at a path by folder name: those of the path itself, else those of its sub-folders.

    A folder holds a run directory, as itself or as its sub-folder `mismatch`, or logs of TRL or verl. A sub-folder that cannot be
    read is a problem of the first run. Raises RunDirectoryError, if no run can be read, or PeerVersionError.
    """
    root, unread = Path(directory), {}
    try:
        runs = _runs_at(root)
        if not runs and root.is_dir():
            for folder in sorted(path for path in root.iterdir() if path.is_dir()):
                try:
                    inside = _runs_at(folder)
                except (RunDirectoryError, PermissionError) as error:
                    unread[folder.name] = error
                    continue
                runs |= {folder.name if len(inside) == 1 else f"{folder.name}/{n}": run for n, run in inside.items()}
            if unread and not runs:
                raise next(iter(unread.values()))
    except (PermissionError, ValueError) as error:
        raise RunDirectoryError(f"{root} cannot be read: {error}; give a readable run directory.") from error
    if not runs:
        found = f"holds no {METRICS_FILES} and no other log" if root.exists() else "does not exist"
        raise RunDirectoryError(f"{root} {found}; {GIVE}")
    if unread:
        first = next(iter(runs))
        left_out = (f"the folder {name} was left out: {error}" for name, error in unread.items())
        runs[first] = replace(runs[first], problems=(*runs[first].problems, *left_out))
    return runs


def _runs_at(path: Path) -> dict[str, RunData]:
    if path.is_file():
        folder = path.resolve().parent.name
        return {folder: read_run(path.parent)} if is_ours(path) else _host_logs(path, folder)
    run = run_of(path)
    if run is not None:
        return {path.resolve().name: read_run(run)}
    # The last checkpoint's state holds the whole history.
    states = [state for state in path.glob(f"checkpoint-*/{TRAINER_STATE}") if state.parent.name[11:].isdecimal()]
    states.sort(key=lambda state: int(state.parent.name[11:]), reverse=True)
    logs = [*path.glob(TRAINER_STATE), *states][:1] + sorted(filter(_is_verls, path.glob("*.jsonl")))
    if not logs and (events := sorted(path.glob(EVENTS))):
        return _host_logs(events[0], path.resolve().name, *events[1:])
    runs: dict[str, RunData] = {}
    for log in logs:
        runs |= _host_logs(log, log.stem if len(logs) > 1 else path.resolve().name)
    return runs


def _is_verls(path: Path) -> bool:
    """Return whether a file begins with a line of verl's file logger."""
    with path.open("rb") as lines:
        try:
            first = json.loads(next(lines, b""))
        except (ValueError, RecursionError):
            return False
    return isinstance(first, dict) and first.keys() == {"step", "data"}


def _host_logs(source: Path, name: str, *resumed: Path) -> dict[str, RunData]:
    """Return the runs of a log; each has the given name, unless the log names several."""
    try:
        logs = _read(source, *resumed)
        for log in logs.values():
            if not log.rows and log.problems:
                raise ValueError(log.problems[0].removesuffix("."))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise RunDirectoryError(f"{source} is not a log that is known here ({error!r}); {GIVE}") from error
    if not any(log.rows for log in logs.values()):
        raise RunDirectoryError(f"{source} holds no step: the run logged nothing yet; {GIVE}")
    return {run or name: _run(source, log, run) for run, log in logs.items()}


def _read(source: Path, *resumed: Path) -> dict[str, _Rows]:
    """Return the lines of each run in a log; its name is "" unless the log says it."""
    if source.match(EVENTS):
        return {"": _tensorboard(source, *resumed)}
    if source.suffix == ".json":
        return {"": _trainer_state(json.loads(source.read_bytes()))}
    if source.suffix == ".jsonl":
        return {"": _verl(source)}
    text = source.read_text(encoding="utf-8", errors="replace")
    if source.suffix == ".csv":
        runs = of_wandb(text)
        host = _host_of(name for rows in runs.values() for *_, metrics in rows for name in metrics)
        return {run: _Rows.of(host, rows) for run, rows in runs.items()}
    console = of_console(text)
    return {"": _verl(source) if console is None else _Rows.of(*console)}


def _trainer_state(state: Mapping[str, Any]) -> _Rows:
    read = _Rows("TRL")
    history = state["log_history"]
    if not isinstance(history, list):
        raise TypeError(f"log_history is {shown(history)}, not a list")
    for number, record in enumerate(history, start=1):
        where = f"entry {number} of log_history"
        if not isinstance(record, Mapping):
            read.problems.append(f"{where} was left out: {shown(record)} is not a mapping of metrics.")
            continue
        step = record.get("step")
        evaluation = {
            name.removeprefix(EVALUATION): value for name, value in record.items() if name.startswith(EVALUATION)
        }
        if evaluation:
            read.add(where, step, "eval/eval", evaluation)
        else:
            read.add(where, step, "train", record)
    return read


def _verl(path: Path) -> _Rows:
    read = _Rows("verl")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                if line.endswith(b"\n"):
                    read.problems.append(f"line {number} was left out: {error}.")
                else:
                    read.problems.append(
                        f"line {number} is torn ({error}): the run was killed while writing it, or is writing it."
                    )
                continue
            if isinstance(record, Mapping):
                read.add(f"line {number}", record.get("step"), "train", record.get("data"))
            else:
                read.problems.append(
                    f"line {number} was left out: {shown(record)} is not a step of verl's file logger."
                )
    return read


def _tensorboard(*paths: Path) -> _Rows:
    """Read the event files of one run, oldest first: each time that a run resumes it begins another."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise PeerVersionError(
            "reading event files needs tensorboard, which is not installed; run `pip install tensorboard`."
        ) from error
    read = _Rows("TRL")
    scalars: list[tuple[str, int, str, dict[str, float]]] = []
    if len(paths) > 1:
        read.problems.append(f"{len(paths)} event files are read as one resumed run; give one of them to see it alone.")
    for path in paths:
        events = EventAccumulator(str(path), size_guidance={"scalars": 0})
        events.Reload()
        for tag in events.Tags()["scalars"]:
            # transformers puts "train/" and "eval/" before its names, which may have other slashes.
            split, name = ("eval/eval", tag[5:]) if tag.startswith("eval/") else ("train", tag.removeprefix("train/"))
            for event in events.Scalars(tag):
                scalars.append((f"{tag} at step {event.step}", event.step, split, {name: event.value}))
    read.host = _host_of(name for *_, metrics in scalars for name in metrics)
    for scalar in scalars:
        read.add(*scalar)
    return read


def _run(source: Path, read: _Rows, name: str) -> RunData:
    steps: dict[tuple[str, int], dict[str, float | None]] = {}
    for step, split, metrics in read.rows:
        steps.setdefault((split, step), {}).update(metrics)
    ours = OURS[read.host]
    renamed = {
        key: metrics | {ours[name]: value for name, value in metrics.items() if name in ours}
        for key, metrics in sorted(steps.items())
    }
    logged = {name.removeprefix(PREFIX) for metrics in renamed.values() for name in metrics if name.startswith(PREFIX)}
    records = [
        StepRecord(kind="step", segment=0, step=step, split=split, metrics=metrics)
        for (split, step), metrics in renamed.items()
    ]
    return RunData(
        path=source.parent,
        headers=(_header(source, read.host, name),),
        events=tuple(_alarms(renamed, HOSTS.get(read.host, HostNames()))),
        steps=tuple(records),
        problems=(_about(source, read.host, logged & MEASURES.keys()), *read.problems),
    )


def _alarms(steps: Mapping[tuple[str, int], dict[str, float | None]], names: HostNames) -> Iterable[EventRecord]:
    """Yield the built-in alarms over the logs of training as the events of a run with this package."""
    # A report of our own log does without the config's models, which take a tenth of a second to import.
    from mismatch_ext.config import MonitorConfig

    rules, alarms, growth = rules_of(MonitorConfig(), names), AlarmState(), Growth()
    for (split, step), metrics in steps.items():
        if split != "train":
            continue
        mean, k3 = (metrics.get(PREFIX + name) for name in ("logp_abs_diff_mean", "k3_kl"))
        size = k3
        if k3 is None and mean is not None:
            # TRL logs no k3, so the growth is that of the mean. Its floor is the mean size of normally distributed differences
            # whose k3 is that of the floor.
            size = max(mean, math.sqrt(GROWTH_FLOOR * 4 / math.pi))
        watched = {name: math.nan if value is None else value for name, value in metrics.items()}
        if size is not None and PREFIX + "k3_growth" not in metrics:
            growth, of_size = grown(growth, step, size)
            watched |= {PREFIX + name: value for name, value in of_size.items()}
        alarms, raised = watch(alarms, watched, rules, step)
        for alarm in raised:
            value = alarm.value if math.isfinite(alarm.value) else None
            yield EventRecord(
                kind="event",
                segment=0,
                step=step,
                level=alarm.level,
                name=ALARM,
                message=alarm.message,
                data=dataclasses.asdict(alarm) | {"value": value},
            )


def _header(source: Path, host: str, name: str) -> dict[str, Any]:
    names = HOSTS.get(host, HostNames())
    # Stock verl logs at each step the rate of the next one.
    names_of_host = names.to_dict() | ({"next_rate": True} if names is VERL else {})
    folder = source.resolve().parent
    output = folder.parent if folder.name.startswith("checkpoint-") else folder
    is_of_folder = source.name == TRAINER_STATE or source.match(EVENTS)
    run = {"name": name or (output.name if is_of_folder else source.stem), "host": f"stock {host}"}
    opening = {"kind": "header", "segment": 0, "of": "training", "resume_step": None}
    return opening | {"names": names_of_host, "log": source.name, "run": run}


def _about(source: Path, host: str, logged: set[str]) -> str:
    missing = [name for name in CENTRAL if name not in logged]
    text = f"read from {host}'s own log, {source.name}"
    if not logged & {"logp_abs_diff_mean", "k3_kl"}:
        text += ": it has no figure of the gap's size"
    if host == "verl" and logged:
        text += ". How stale its rollouts were is unknown: with asynchronous rollouts, part of the gap may be drift"
    if not missing:
        return f"{text}."
    asked = f"; to have them logged: {MEASURE[host]}" if host in MEASURE else ""
    return f"{text}. Missing: {', '.join(missing)}{asked}."
