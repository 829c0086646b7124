"""Reads the metrics of a run back: whatever is well-formed is data, everything else is a sentence in `problems`.

Each segment has a file, `metrics-000.jsonl` and so on: a training, a training that resumes another one, or an evaluation outside
of a training. Without an `end` line it was killed, or is still being written. A training that resumes none begins another run:
its header names the first segment of that run, and what comes before is left out. Each line is a strict JSON object:

    header   {"kind", "segment", "schema": 1, "time", "of": "training" or "evaluation", ["resume_step" or "first_segment"],
              "run": {"name", "host"}, "names": {role: name in the log}, "trainer": {...}, "engine": {...}, "patches": [...],
              "config": {...}, "versions": {package: version}}
    step     {"kind", "segment", "step", "split", "metrics": {name: number or null}, ["nonfinite": [name]]}
    profile  {"kind", "segment", "step", "split", "profiles": {"position": {...}, "probability": {...}}}
    scatter  {"kind", "segment", "step", "split", "rollout_logprobs": [...], "old_logprobs": [...]}
    event    {"kind", "segment", "step", "level", "name", "message", "data"}
    end      {"kind", "segment", "step", "status", "message"}

`split` is "train" or "eval/<name>". A number that is not finite is null, and named in `nonfinite`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from mismatch_ext.errors import RunDirectoryError
from mismatch_ext.events import ALARM, BAD_ROW_REASONS, BAD_ROWS, CHECK_FAILED
from mismatch_ext.names import HostNames, Role, names_of

METRICS_FILES = "metrics-*.jsonl"
"""Files of a run directory, one for each segment."""
_METRICS_FILE = re.compile(r"metrics-(\d{3,})\.jsonl")
DOCTOR_FILE = "doctor.json"
"""What the doctor found of a run, in its folder or in one below it."""
INTERRUPTED = re.compile(r"(rank \d+: )?KeyboardInterrupt")
"""How the message of an end line begins after Ctrl-C."""
RUN_FOLDER = "mismatch"
"""Sub-folder of its own output folder in which a host writes the run directory."""
SCHEMA = 1
Segment = Literal["training", "evaluation"]
COLUMNS = frozenset({"count", "abs_diff_mean", "abs_diff_max", "k3_mean"})
Count = Annotated[int, Field(ge=0, le=2**53)]  # readers in other languages keep no larger integer exactly


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)

    segment: Count


class _Part(BaseModel):
    """What the report reads of a part of a line; further keys may have any value."""

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False, extra="allow")


class _Run(_Part):
    name: str | None = None
    host: str | None = None
    model_type: str | None = None


class _Side(_Part):
    compute_dtype: str | None = None
    autocast_dtype: str | None = None
    model_dtype: str | None = None
    dtype: str | None = None
    parameter_dtypes: dict[str, Any] | list[str] | None = None


class _Sampling(_Part):
    repetition_penalty: float | None = None


class _Kl(_Part):
    target_kl: float | None = None


class _Routing(_Part):
    mode: str | None = None


class _Config(_Part):
    level: str | None = None
    kl: _Kl | None = None
    routing: _Routing | None = None
    correction: dict[str, Any] | None = None


class Header(_Line):
    """Opens a segment; what the host says of the run stands in further keys."""

    model_config = ConfigDict(frozen=True, strict=True, extra="allow", allow_inf_nan=False)

    kind: Literal["header"]
    of: Segment = "training"
    resume_step: Count | None = None
    first_segment: Count | None = None
    run: _Run | None = None
    names: dict[str, str | bool] | None = None
    trainer: _Side | None = None
    engine: _Side | None = None
    sampling: _Sampling | None = None
    config: _Config | None = None
    versions: dict[str, Any] | None = None
    patches: list[dict[str, Any]] | None = None
    audit: dict[str, Any] | None = None

    def written(self) -> dict[str, Any]:
        """Return the header as it was written, with the defaults of the two keys that every reader asks for."""
        return self.model_dump(exclude_unset=True) | {"of": self.of, "resume_step": self.resume_step}


class _Record(_Line):
    step: Count


class _Measured(_Record):
    split: Annotated[str, Field(pattern=r"^(train|eval/\S.*)$")]


class StepRecord(_Measured):
    """Metrics of one optimizer step and split; None marks a value that was NaN or infinite."""

    kind: Literal["step"]
    metrics: dict[str, float | None]


class ProfileRecord(_Measured):
    """Profiles of one step and split: name -> {edges, count, abs_diff_mean, abs_diff_max, k3_mean}, a number for each bin."""

    kind: Literal["profile"]
    profiles: dict[str, dict[str, list[float | None]]]

    @model_validator(mode="after")
    def _check(self) -> ProfileRecord:
        for name, profile in self.profiles.items():
            bins = len(profile.get("count", ()))
            whole = profile.keys() == COLUMNS | {"edges"} and all(len(profile[key]) == bins for key in COLUMNS)
            # The last bin may be open.
            if not whole or len(profile["edges"]) not in (bins, bins + 1):
                raise ValueError(f"profile {name!r}: the columns do not fit together")
            if any(value is None or value < 0 for value in profile["edges"] + profile["count"]):
                raise ValueError(f"profile {name!r}: edges and counts must be numbers, not negative")
        return self


class ScatterRecord(_Measured):
    """A sample of tokens as both sides saw them: natural-log probabilities, equal lengths."""

    kind: Literal["scatter"]
    rollout_logprobs: list[float]
    old_logprobs: list[float]

    @model_validator(mode="after")
    def _check(self) -> ScatterRecord:
        if len(self.rollout_logprobs) != len(self.old_logprobs):
            raise ValueError("the lists have two lengths")
        return self


class _AlarmData(_Part):
    metric: str
    status: Literal["raised", "cleared"]
    side: Literal["above", "below", "non-finite"]
    threshold: float | None
    first_step: Count


class _FailedCheckData(_Part):
    check: str
    count: Count
    message: str


class _BadRowsData(_Part):
    reason: str | None  # None: the rows of all reasons, which were too many
    rows: Count

    @model_validator(mode="after")
    def _check(self) -> _BadRowsData:
        if self.reason is not None and self.reason not in BAD_ROW_REASONS:
            raise ValueError(f"the reason {self.reason!r} is not one of {', '.join(BAD_ROW_REASONS)}")
        return self


_EVENT_DATA: dict[str, type[_Part]] = {
    ALARM: _AlarmData,
    CHECK_FAILED: _FailedCheckData,
    BAD_ROWS: _BadRowsData,
}
"""What the report reads of the data of an event, by the event's name."""


class EventRecord(_Record):
    """Something that happened: a weight-sync verdict, an overflow, a recovery, an engine that died."""

    kind: Literal["event"]
    level: Literal["info", "warning", "error"]
    name: str
    message: str
    data: Any = None

    @model_validator(mode="after")
    def _check(self) -> EventRecord:
        if self.name in _EVENT_DATA:
            try:
                _EVENT_DATA[self.name].model_validate(self.data)
            except ValidationError as error:
                raise ValueError(f"data of an event {self.name!r}: {first_of(error)}") from None
        return self


class EndRecord(_Record):
    """The line that a segment's writer writes last; one that was killed has written none."""

    kind: Literal["end"]
    status: Literal["completed", "failed"]
    message: str


Line = Header | StepRecord | ProfileRecord | ScatterRecord | EventRecord | EndRecord
_LINE: TypeAdapter[Line] = TypeAdapter(Annotated[Line, Field(discriminator="kind")])


def parse_line(raw: bytes) -> Line:
    """Return a line by its kind; raises ValueError with the reason if it is not one."""
    try:
        return _LINE.validate_json(raw)
    except ValidationError as error:
        raise ValueError(first_of(error)) from None


def first_of(error: ValidationError) -> str:
    """Return the place and the reason of the first of pydantic's errors."""
    first = error.errors(include_url=False, include_context=False)[0]
    place = ".".join(map(str, first["loc"]))
    return f"{place}: {first['msg']}" if place else str(first["msg"])


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a run ended.

    `open` means that a line about it is missing: it was killed or is still running. `interrupted` is Ctrl-C, and `unknown` what
    a host's own log says, which has no such line.
    """

    of: Segment
    status: Literal["completed", "failed", "interrupted", "open", "unknown"]
    message: str = ""
    step: int = 0


@dataclass(frozen=True, kw_only=True)
class Column:
    """One metric of a split, with an entry for each of the split's step lines.

    Attributes:
        values: float64 `[lines]`, NaN where the metric was not finite or not logged.
        logged: bool `[lines]`, whether the line has the metric.
    """

    values: NDArray[np.float64]
    logged: NDArray[np.bool_]

    @property
    def finite(self) -> NDArray[np.bool_]:
        """Tell at which lines the metric is a finite number."""
        finite: NDArray[np.bool_] = np.isfinite(self.values)
        return finite

    @property
    def broken(self) -> NDArray[np.bool_]:
        """Tell at which lines the metric was NaN or infinite."""
        broken: NDArray[np.bool_] = self.logged & np.isnan(self.values)
        return broken


@dataclass(frozen=True, kw_only=True)
class Table:
    """All metrics of a split: `steps`, int64 `[lines]`, ascending, and a column for each metric."""

    steps: NDArray[np.int64]
    columns: dict[str, Column]

    @staticmethod
    def of(records: Sequence[StepRecord]) -> Table:
        """Turn the step lines of one split into arrays."""
        count = len(records)
        values: dict[str, NDArray[np.float64]] = {}
        logged: dict[str, NDArray[np.bool_]] = {}
        for line, record in enumerate(records):
            for name, value in record.metrics.items():
                if name not in values:
                    values[name] = np.full(count, np.nan)
                    logged[name] = np.zeros(count, bool)
                logged[name][line] = True
                if value is not None:
                    values[name][line] = value
        return Table(
            steps=np.array([record.step for record in records], np.int64),
            columns={name: Column(values=values[name], logged=logged[name]) for name in values},
        )


@dataclass(frozen=True, kw_only=True)
class RunData:
    """Everything read from one run directory, in step order; later segments replace earlier ones."""

    path: Path
    headers: tuple[dict[str, Any], ...] = ()
    steps: tuple[StepRecord, ...] = ()
    profiles: tuple[ProfileRecord, ...] = ()
    scatters: tuple[ScatterRecord, ...] = ()
    events: tuple[EventRecord, ...] = ()
    ends: tuple[EndRecord, ...] = ()
    problems: tuple[str, ...] = ()

    @cached_property
    def tables(self) -> dict[str, Table]:
        """The metrics of each split that has step lines, train first."""
        records: dict[str, list[StepRecord]] = {}
        for record in self.steps:
            records.setdefault(record.split, []).append(record)
        order = sorted(records, key=lambda split: (split != "train", split))
        return {split: Table.of(records[split]) for split in order}

    @property
    def splits(self) -> list[str]:
        """Splits that have step lines, train first."""
        return list(self.tables)

    @property
    def trainings(self) -> list[dict[str, Any]]:
        """Headers of the segments that are trainings."""
        return [header for header in self.headers if header["of"] == "training"]

    @property
    def resumes(self) -> list[dict[str, Any]]:
        """Headers of the trainings that resume another one."""
        return [header for header in self.headers if header["resume_step"] is not None]

    @property
    def header(self) -> dict[str, Any]:
        """Header of the last training, otherwise of the last evaluation; empty if none could be read."""
        return (self.trainings or list(self.headers) or [{}])[-1]

    @property
    def is_host_log(self) -> bool:
        """Whether TRL or verl wrote this log, without this package."""
        return "log" in self.header

    @property
    def source(self) -> str:
        """Name of the file that was read."""
        return str(self.header.get("log", METRICS_FILES))

    @property
    def names(self) -> HostNames:
        """The names that the host of this run gives its own metrics."""
        return names_of(self.header)

    @property
    def ending(self) -> Ending:
        """How the last training ended; without a training, how the evaluations did: badly if one of them did."""
        if self.is_host_log:
            return Ending(of="training", status="unknown")
        of: Segment = "training" if self.trainings or not self.headers else "evaluation"
        evaluations = {header["segment"] for header in self.headers}
        segments = {self.header.get("segment", 0)} if of == "training" else evaluations
        ends = {end.segment: end for end in self.ends if end.segment in segments}
        failed = [end for end in ends.values() if end.status == "failed"]
        if not failed and len(ends) < len(segments):
            return Ending(of=of, status="open")
        last = (failed or list(ends.values()))[-1]
        interrupted = last.status == "failed" and INTERRUPTED.match(last.message)
        status = "interrupted" if interrupted else last.status
        return Ending(of=of, status=status, message=last.message, step=last.step)

    @property
    def first_step(self) -> int:
        """The first step that has a line, of training if there was one; 0 if no step has one."""
        first = self.splits[:1]
        return min((record.step for record in self.steps if record.split in first), default=0)

    @property
    def last_step(self) -> int:
        """The last step that has a line; 0 if no step has one."""
        return max((record.step for record in self.steps), default=0)

    def logged(self, split: str | None = None) -> set[str]:
        """Return the names of all metrics that a split logged; of all splits if none is given."""
        tables = [table for name, table in self.tables.items() if split in (None, name)]
        return {name for table in tables for name in table.columns}

    def column(self, name: str, split: str = "train") -> Column | None:
        """Return a metric of a split, by name or `Role`; None if the split has not logged it."""
        table = self.tables.get(split)
        logged = self.names.of(name) if isinstance(name, Role) else name
        return None if table is None else table.columns.get(logged)

    def series(self, name: str, split: str = "train") -> tuple[list[int], list[float | None]]:
        """Return the steps at which a metric was logged, by name or `Role`, and its values, None where they were not finite."""
        column = self.column(name, split)
        if column is None:
            return [], []
        steps = self.tables[split].steps[column.logged].tolist()
        numbers = column.values[column.logged].tolist()
        values = [None if math.isnan(number) else number for number in numbers]
        if name is Role.LEARNING_RATE and self.names.next_rate:
            # The host logs at each step the rate of the next step; the last value belongs to a step that was not taken.
            logged_at = dict(zip(steps, values, strict=True))
            steps = [step for step in steps if step - 1 in logged_at]
            values = [logged_at[step - 1] for step in steps]
        return steps, values

    def finite(self, name: str, split: str = "train") -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the steps at which a metric was a finite number, and its values."""
        column = self.column(name, split)
        if column is None:
            return np.empty(0, np.int64), np.empty(0)
        return self.tables[split].steps[column.finite], column.values[column.finite]


def number_of_segment(path: Path) -> int:
    """Return the number of a segment by its file; raises ValueError for another file."""
    named = _METRICS_FILE.fullmatch(path.name)
    if named is None:
        raise ValueError(f"{path.name} is not a {METRICS_FILES}.")
    return int(named[1])


def is_ours(path: Path) -> bool:
    """Return whether a file has the name of a segment."""
    return _METRICS_FILE.fullmatch(path.name) is not None


def segment_files(folder: Path) -> list[Path]:
    """Return the files of a run directory in the order of their segments; raises OSError or ValueError."""
    return sorted(filter(is_ours, folder.iterdir()), key=number_of_segment)


def run_of(folder: Path) -> Path | None:
    """Return the run directory of a folder: the folder itself, or its sub-folder `mismatch` if it is a host's output folder."""
    for path in (folder, folder / RUN_FOLDER):
        if path.is_dir() and segment_files(path):
            return path
    return None


def read_run(run_dir: str | Path) -> RunData:
    """Read the last run of a directory, tolerating torn, garbage and unknown lines.

    Lines of the same segment, step and split are merged. A later segment's line replaces an earlier segment's. Earlier
    lines beyond the step that a later segment resumed from are left out, and so are segments of an earlier run.

    Returns:
        The data, with one sentence in `problems` for every line that could not be used.

    Raises:
        RunDirectoryError: There are no files, or one cannot be read.
    """
    folder, reader = Path(run_dir), _Reader()
    try:
        files = segment_files(folder)
        for path in _of_last_run(files):
            _read_segment(path, reader)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RunDirectoryError(
            f"{folder} cannot be read: {reason}; give a folder that holds {METRICS_FILES}."
        ) from error
    if not files:
        raise RunDirectoryError(f"{folder} holds no {METRICS_FILES}; give a folder that does.")
    return reader.finish(folder)


def _of_last_run(files: Sequence[Path]) -> list[Path]:
    """Return the files from the first segment of the last training that resumes none; all of them if there is none."""
    for path in reversed(files):
        with path.open("rb") as lines:
            try:
                header = parse_line(next(lines, b""))
            except ValueError:
                continue  # killed while it wrote its header
        if isinstance(header, Header) and header.first_segment is not None:
            first = header.first_segment
            return [file for file in files if number_of_segment(file) >= first]
    return list(files)


def _read_segment(path: Path, reader: _Reader) -> None:
    number = 0
    with path.open("rb") as lines:
        for number, raw in enumerate(lines, start=1):
            try:
                reader.add(parse_line(raw.removesuffix(b"\n")))
            except ValueError as error:
                where = f"{path.name}, line {number}"
                if raw.endswith(b"\n"):
                    reader.problems.append(f"{where} was left out: {error}.")
                else:
                    reader.problems.append(f"{where} is torn ({error}): the run was killed while writing it.")
    if not number:
        reader.problems.append(f"{path.name} is empty: the run stopped before it wrote its header.")


@dataclass
class _Reader:
    """Collects the data of a run, line by line, in the order of its segments."""

    headers: list[dict[str, Any]] = field(default_factory=list)
    # By step and split, for each of the three kinds that are measured.
    measured: dict[str, dict[tuple[int, str], Any]] = field(
        default_factory=lambda: {"step": {}, "profile": {}, "scatter": {}}
    )
    events: list[EventRecord] = field(default_factory=list)
    ends: list[EndRecord] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add(self, line: Line) -> None:
        if isinstance(line, Header):
            self.headers.append(line.written())
        elif isinstance(line, EventRecord):
            self.events.append(line)
        elif isinstance(line, EndRecord):
            self.ends.append(line)
        else:
            table, key = self.measured[line.kind], (line.step, line.split)
            before = table.get(key)
            if isinstance(line, StepRecord) and before is not None and before.segment == line.segment:
                line = line.model_copy(update={"metrics": before.metrics | line.metrics})
            table[key] = line

    def finish(self, path: Path) -> RunData:
        if not self.headers:
            self.problems.append("no header could be read: versions, dtypes and settings are unknown.")
        for header in self.headers:
            if header["resume_step"] is not None:
                self._drop_abandoned(header["segment"], header["resume_step"])
        steps, profiles, scatters = (tuple(table[key] for key in sorted(table)) for table in self.measured.values())
        return RunData(
            path=path,
            headers=tuple(self.headers),
            steps=steps,
            profiles=profiles,
            scatters=scatters,
            events=tuple(self.events),
            ends=tuple(self.ends),
            problems=tuple(self.problems),
        )

    def _drop_abandoned(self, segment: int, resumed: int) -> None:
        """Leave out the records of earlier segments after the checkpoint that a segment resumed from."""
        for kind, table in self.measured.items():
            lost = sorted(key for key, record in table.items() if record.segment < segment and key[0] > resumed)
            for key in lost:
                del table[key]
            if kind == "step" and lost:
                self.problems.append(
                    f"segment {segment} resumed from step {resumed}: {len(lost)} earlier step lines "
                    f"(steps {lost[0][0]} to {lost[-1][0]}) have not been run again and are left out."
                )
