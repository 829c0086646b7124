"""Read a run directory back: whatever is well-formed is data, everything else is a sentence in `problems`.

The line format is documented in `mismatch_ext.stream`, which writes it. A run may have been killed, resumed,
truncated or damaged; reading never raises for the content of the file, only for a file that is not there.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeGuard

from mismatch_ext.errors import RunDirectoryError
from mismatch_ext.host_names import HostNames, Role, names_of
from mismatch_ext.older import OlderMetric, OlderSteps

METRICS_FILE = "metrics.jsonl"
RUN_FOLDER = "mismatch"
"""Where a host's run puts it, in its own output folder."""
SCHEMA = 1
LEVELS = ("info", "warning", "error")
STATUSES = ("completed", "failed")
ENDED = ("training", "evaluation")
SPLIT_PATTERN = re.compile(r"train|eval/\S.*")
# Largest integer that JSON readers in other languages keep exactly.
MAX_STEP = 2**53
# Rounding may put a log-probability this far above 0; more than that is no log-probability.
MAX_LOGPROB = 1e-2
PROFILE_COLUMNS = ("abs_diff_mean", "abs_diff_max", "k3_mean")


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """Metrics of one optimizer step and split; None marks a value that was NaN or infinite."""

    segment: int
    step: int
    split: str
    metrics: dict[str, float | None]


@dataclass(frozen=True, kw_only=True)
class ProfileRecord:
    """Profiles of one step and split: name -> {edges, count, abs_diff_mean, abs_diff_max, k3_mean}."""

    segment: int
    step: int
    split: str
    profiles: dict[str, dict[str, list[float | None]]]


@dataclass(frozen=True, kw_only=True)
class ScatterRecord:
    """A sample of tokens as both sides saw them: natural-log probabilities, equal lengths."""

    segment: int
    step: int
    split: str
    rollout_logprobs: tuple[float, ...]
    old_logprobs: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class EventRecord:
    """Something that happened: a weight-sync verdict, an overflow, a recovery, an engine that died."""

    segment: int
    step: int
    level: str
    name: str
    message: str
    data: Any = None


@dataclass(frozen=True, kw_only=True)
class EndRecord:
    """The line a run writes last; a run that was killed has none.

    `of` says what ended: a training, or an evaluation without one. Lines after the end of an evaluation (a training that
    began after all) undo it; that of one that failed is undone by a training alone, and not by the next evaluation.
    """

    segment: int
    step: int
    status: str
    message: str
    of: str = "training"


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """Info events of one name and segment that were counted and not kept; `undone` of them a later segment undid."""

    count: int
    first_step: int
    last_step: int
    undone: int
    last: EventRecord


@dataclass(frozen=True, kw_only=True)
class RunData:
    """Everything read from one run directory, in step order, later segments in place of earlier ones.

    Of a long run that `mismatch_ext.longrun.read_long_run` read, `steps` are the last ones, `older` stands for those before,
    by split, `repeats` for info events beyond the first ones of a segment and name, and `more_problems` for further problems.
    """

    path: Path
    headers: tuple[dict[str, Any], ...] = ()
    steps: tuple[StepRecord, ...] = ()
    profiles: tuple[ProfileRecord, ...] = ()
    scatters: tuple[ScatterRecord, ...] = ()
    events: tuple[EventRecord, ...] = ()
    ends: tuple[EndRecord, ...] = ()
    problems: tuple[str, ...] = ()
    older: Mapping[str, OlderSteps] = field(default_factory=dict)
    repeats: Mapping[tuple[int, str], Repeats] = field(default_factory=dict)
    more_problems: int = 0

    @property
    def splits(self) -> list[str]:
        """Splits that have step lines, train first."""
        found = {record.split for record in self.steps} | set(self.older)
        return sorted(found, key=lambda split: (split != "train", split))

    @property
    def last_step(self) -> int:
        """The last step with a line, 0 without one."""
        older = [found.last_step for found in self.older.values()]
        return max([record.step for record in self.steps] + older, default=0)

    def logged(self, split: str | None = None) -> set[str]:
        """Return the names of all metrics that a split logged, or any did."""
        found = {name for record in self.steps if split in (None, record.split) for name in record.metrics}
        return found | {name for of, older in self.older.items() if split in (None, of) for name in older.metrics}

    def count(self, split: str) -> int:
        """Return how many steps a split has."""
        older = self.older[split].steps if split in self.older else 0
        return older + sum(record.split == split for record in self.steps)

    def logs(self, name: str, split: str = "train") -> tuple[int, int]:
        """Return at how many steps a metric was logged, and at how many of them it was not finite."""
        values = [r.metrics[name] for r in self.steps if r.split == split and name in r.metrics]
        logs, broken = len(values), values.count(None)
        if (older := self._older(name, split)) is not None:
            logs, broken = logs + older.logs, broken + older.logs - older.known
        return logs, broken

    def _older(self, name: str, split: str) -> OlderMetric | None:
        return self.older[split].metrics.get(name) if split in self.older else None

    @property
    def header(self) -> dict[str, Any]:
        """Header of the last segment, or an empty dict when none could be read."""
        return self.headers[-1] if self.headers else {}

    @property
    def names(self) -> HostNames:
        """What the host of this run calls its own metrics."""
        return names_of(self.header)

    def series(self, name: str, split: str = "train") -> tuple[list[int], list[float | None]]:
        """Return the steps at which a metric was logged and its values, None where it was not finite.

        Of `older` steps these are the first ones and the extremes.

        Args:
            name: As it was logged, or a `Role`, whatever the host calls that.
            split: "train" or "eval/<name>".
        """
        logged = self.names.of(name) if isinstance(name, Role) else name
        rows = [r for r in self.steps if r.split == split and logged in r.metrics]
        steps, values = [r.step for r in rows], [r.metrics[logged] for r in rows]
        older = self._older(logged, split)
        points = [] if older is None else older.points()
        if name is Role.LEARNING_RATE and self.names.next_rate:
            # What was logged at a step is the rate of the next one; the last is of a step that was not taken.
            logged_at = dict(zip(steps, values, strict=True))
            steps = [step for step in steps if step - 1 in logged_at]
            values = [logged_at[step - 1] for step in steps]
            points = [(step + 1, value) for step, value in points]
        return [step for step, _ in points] + steps, [value for _, value in points] + values

    def falls(self, name: str, split: str = "train") -> list[tuple[int, float]]:
        """Return the steps at which a metric was below what it was at its log before, and its values; 0 is none."""
        rows = [(r.step, r.metrics[name]) for r in self.steps if r.split == split and name in r.metrics]
        older = self._older(name, split)
        found = [] if older is None else older.falls
        if older is not None and older.last is not None:
            rows.insert(0, older.last)
        pairs = zip(rows, rows[1:], strict=False)
        return found + [(step, b) for (_, a), (step, b) in pairs if a and b and b < a]


def _run_of(folder: Path) -> Path | None:
    """Return the run directory that a folder is, or that a host has put into it, its output folder."""
    return next((path for path in (folder, folder / RUN_FOLDER) if (path / METRICS_FILE).is_file()), None)


def find_runs(directory: str | Path) -> dict[str, Path]:
    """Find the run directories at a path: the folder itself, or else its direct sub-folders; or the `mismatch` folder in them.

    Returns:
        Folder name -> path of every folder that holds a `metrics.jsonl`, sorted by name; of a trainer's output folder its name.

    Raises:
        RunDirectoryError: The path is missing, is a file, or holds no run.
    """
    root = Path(directory)
    try:
        if (own := _run_of(root)) is not None:
            return {root.resolve().name: own}
        if root.is_dir():
            found = {p.name: run for p in sorted(root.iterdir()) if (run := _run_of(p)) is not None}
        else:
            state = "is a file, not a folder" if root.exists() else "does not exist"
            raise RunDirectoryError(f"{root} {state}; give a folder that holds {METRICS_FILE}.")
    except (PermissionError, ValueError) as error:
        raise RunDirectoryError(f"{root} cannot be read: {error}; give a readable run directory.") from error
    if not found:
        raise RunDirectoryError(
            f"{root} holds no {METRICS_FILE}, and none of its sub-folders does; give the run directory "
            f"(`mismatch.monitor.run_dir`, by default `mismatch` in the trainer's output folder) or a folder of run directories."
        )
    return found


def read_run(run_dir: str | Path) -> RunData:
    """Read a run directory, tolerating torn, garbage and unknown lines.

    Lines of the same segment, step and split are merged. A later segment's line takes the place of an earlier
    segment's, and earlier lines beyond the step a later segment resumed from are left out.

    Returns:
        The data, with one sentence in `problems` for every line or value that could not be used.

    Raises:
        RunDirectoryError: `metrics.jsonl` is missing or cannot be read.
    """
    reader = Reader()
    with open_metrics(run_dir) as file:
        read_lines(file, reader)
    return reader.finish(Path(run_dir))


def open_metrics(run_dir: str | Path) -> BinaryIO:
    """Open the metrics of a run directory for reading; raise `RunDirectoryError` where that cannot be."""
    path = Path(run_dir) / METRICS_FILE
    try:
        return path.open("rb")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RunDirectoryError(f"{path} cannot be read: {reason}; give a folder that holds {METRICS_FILE}.") from error


def read_lines(lines: Iterable[bytes], reader: Reader) -> None:
    """Give every line to a reader; one without its end is torn."""
    number = 0
    for number, line in enumerate(lines, start=1):
        reader.add(number, line.removesuffix(b"\n"), torn=not line.endswith(b"\n"))
    if not number:
        reader.problem(f"{METRICS_FILE} is empty: the run stopped before it wrote its header.")


def parse_line(line: bytes) -> dict[str, Any]:
    """Parse one line as a strict JSON object; raises ValueError with the reason when it is not one."""
    try:
        # json.loads builds a decoder for each call; other encodings than UTF-8 it alone knows.
        plain = line[:1] == b"{" and line[1:2] != b"\0"
        value = _DECODER.decode(line.decode("utf-8", "surrogatepass")) if plain else json.loads(line, **_STRICT)
    except UnicodeDecodeError as error:
        raise ValueError("not UTF-8 text") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg})") from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError(f"a JSON {type(value).__name__}, not an object")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"not strict JSON ({name})")


_STRICT: dict[str, Any] = {"parse_constant": _refuse_constant}
_DECODER = json.JSONDecoder(**_STRICT)


def is_resume_step(value: object) -> TypeGuard[int]:
    """Tell whether a header's `resume_step` is a step."""
    return isinstance(value, int) and not isinstance(value, bool)


def _integer(line: dict[str, Any], key: str) -> int:
    value = line.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_STEP:
        raise ValueError(f"{key} is {_short(value)}, not a non-negative integer")
    return value


def _text(line: dict[str, Any], key: str, allowed: tuple[str, ...] | re.Pattern[str] | None = None) -> str:
    value = line.get(key)
    if not isinstance(value, str):
        raise ValueError(f"{key} is {_short(value)}, not text")
    if isinstance(allowed, tuple) and value not in allowed:
        raise ValueError(f"{key} is {_short(value)}, not one of {', '.join(allowed)}")
    if isinstance(allowed, re.Pattern) and not allowed.fullmatch(value):
        raise ValueError(f"{key} is {_short(value)}, not 'train' or 'eval/<name>'")
    return value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _finite(value: Any) -> float | None:
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _logprobs(line: dict[str, Any], key: str) -> tuple[float, ...]:
    values = line.get(key)
    if not isinstance(values, list):
        raise ValueError(f"{key} is {_short(values)}, not a list")
    numbers = []
    for value in values:
        number = _finite(value) if _is_number(value) else None
        if number is None or number > MAX_LOGPROB:
            raise ValueError(f"{key} holds {_short(value)}, which is no log-probability")
        numbers.append(number)
    return tuple(numbers)


def _profile(name: str, value: Any) -> dict[str, list[float | None]]:
    """Check one profile: equal-length columns, `edges` one longer (or equal, where the last bin is open)."""
    if not isinstance(value, dict) or not all(isinstance(value.get(k), list) for k in ("edges", "count")):
        raise ValueError(f"profile {name!r} lacks edges or counts")
    columns: dict[str, list[float | None]] = {}
    bins = len(value["count"])
    for key in ("edges", "count", *PROFILE_COLUMNS):
        column = value.get(key, [None] * bins)
        if not isinstance(column, list) or not all(v is None or _is_number(v) for v in column):
            raise ValueError(f"profile {name!r}: {key} is not a list of numbers")
        if len(column) not in ((bins, bins + 1) if key == "edges" else (bins,)):
            raise ValueError(f"profile {name!r}: {key} has {len(column)} entries for {bins} bins")
        columns[key] = [None if v is None else _finite(v) for v in column]
    if any(edge is None for edge in columns["edges"]) or any(n is None or n < 0 for n in columns["count"]):
        raise ValueError(f"profile {name!r}: edges and counts must be finite and not negative")
    return columns


@dataclass
class Reader:
    """State while the lines of one file go by."""

    headers: list[dict[str, Any]] = field(default_factory=list)
    steps: dict[tuple[int, str], StepRecord] = field(default_factory=dict)
    profiles: dict[tuple[int, str], ProfileRecord] = field(default_factory=dict)
    scatters: dict[tuple[int, str], ScatterRecord] = field(default_factory=dict)
    events: list[EventRecord] = field(default_factory=list)
    ends: list[EndRecord] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def problem(self, text: str) -> None:
        """Keep a sentence on what could not be used."""
        self.problems.append(text)

    def add(self, number: int, raw: bytes, *, torn: bool) -> None:
        """Take a line."""
        try:
            line = parse_line(raw)
            self._dispatch(number, line)
        except ValueError as error:
            where = f"line {number}"
            if torn:
                self.problem(f"{where}, the last, is torn ({error}): the run was killed while writing it.")
            else:
                self.problem(f"{where} was left out: {error}.")

    def _dispatch(self, number: int, line: dict[str, Any]) -> None:
        kind = line.get("kind")
        if kind == "header":
            if line.get("schema") != SCHEMA:
                self.problem(
                    f"line {number}: schema {_short(line.get('schema'))} is not {SCHEMA}; "
                    "another release of mismatch-ext may have written this run."
                )
            self.headers.append({**line, "segment": _integer(line, "segment")})
            return
        if kind not in ("step", "profile", "scatter", "event", "end"):
            raise ValueError(f"unknown kind {_short(kind)}")
        at: dict[str, Any] = {"segment": _integer(line, "segment"), "step": _integer(line, "step")}
        self._undo_evaluation(line, at["segment"])
        if kind == "event":
            at |= {"level": _text(line, "level", LEVELS), "name": _text(line, "name")}
            self._keep_event(EventRecord(**at, message=_text(line, "message"), data=line.get("data")))
        elif kind == "end":
            at |= {"status": _text(line, "status", STATUSES), "message": _text(line, "message")}
            at["of"] = _text(line, "of", ENDED) if "of" in line else ENDED[0]
            if not (at["of"] == "evaluation" and self._evaluated(at["segment"])):
                self.ends.append(EndRecord(**at))
        else:
            self._add_measured(number, kind, line, {**at, "split": _text(line, "split", SPLIT_PATTERN)})

    def _undo_evaluation(self, line: dict[str, Any], segment: int) -> None:
        """Take an evaluation's end away when something follows; that of a failed one only when a training does."""
        trains = line.get("split") == "train" or (line["kind"], line.get("name")) == ("event", "training")
        if self._evaluated(segment) and (self.ends[-1].status == "completed" or trains):
            self.ends.pop()

    def _evaluated(self, segment: int) -> bool:
        """Whether the last end is that of an evaluation in this segment."""
        return bool(self.ends) and (self.ends[-1].of, self.ends[-1].segment) == ("evaluation", segment)

    def _add_measured(self, number: int, kind: str, line: dict[str, Any], at: dict[str, Any]) -> None:
        key = (at["step"], at["split"])
        if kind == "step":
            record = StepRecord(**at, metrics=self._metrics(number, line))
            before = self.steps.get(key)
            if before is not None and before.segment == record.segment:
                record = replace(record, metrics={**before.metrics, **record.metrics})
            self._keep_step(key, record)
        elif kind == "profile":
            profiles = line.get("profiles")
            if not isinstance(profiles, dict):
                raise ValueError(f"profiles is {_short(profiles)}, not an object")
            checked = {name: _profile(name, value) for name, value in profiles.items()}
            self._keep_sampled(self.profiles, key, ProfileRecord(**at, profiles=checked))
        else:
            rollout, old = _logprobs(line, "rollout_logprobs"), _logprobs(line, "old_logprobs")
            if len(rollout) != len(old):
                raise ValueError(f"scatter has {len(rollout)} rollout and {len(old)} trainer log-probabilities")
            self._keep_sampled(self.scatters, key, ScatterRecord(**at, rollout_logprobs=rollout, old_logprobs=old))

    def _keep_event(self, event: EventRecord) -> None:
        self.events.append(event)

    def _keep_step(self, key: tuple[int, str], record: StepRecord) -> None:
        self.steps[key] = record

    def _keep_sampled(self, table: dict[tuple[int, str], Any], key: tuple[int, str], record: Any) -> None:
        table[key] = record

    def _metrics(self, number: int, line: dict[str, Any]) -> dict[str, float | None]:
        metrics = line.get("metrics")
        if not isinstance(metrics, dict):
            raise ValueError(f"metrics is {_short(metrics)}, not an object")
        kept: dict[str, float | None] = {}
        for name, value in metrics.items():
            if type(value) is float:  # nearly all
                kept[name] = value if math.isfinite(value) else None
            elif value is None or _is_number(value):
                kept[name] = None if value is None else _finite(value)
            else:
                self.problem(f"line {number}: metric {name!r} was left out: {_short(value)} is no number.")
        return kept

    def finish(self, path: Path) -> RunData:
        """Return what was read."""
        if not self.headers:
            self.problem("no header could be read: versions, dtypes and settings are unknown.")
        self._drop_abandoned()
        return RunData(
            path=path,
            headers=tuple(self.headers),
            steps=tuple(self.steps[key] for key in sorted(self.steps)),
            profiles=tuple(self.profiles[key] for key in sorted(self.profiles)),
            scatters=tuple(self.scatters[key] for key in sorted(self.scatters)),
            events=tuple(self.events),
            ends=tuple(self.ends),
            problems=tuple(self.problems),
        )

    def _drop_abandoned(self) -> None:
        """Leave out what a killed segment recorded after the checkpoint that a later segment resumed from."""
        for header in self.headers:
            segment, resumed = header["segment"], header.get("resume_step")
            if not is_resume_step(resumed):
                continue
            tables: tuple[dict[tuple[int, str], Any], ...] = (self.steps, self.profiles, self.scatters)
            for table in tables:
                lost = sorted(k for k, r in table.items() if r.segment < segment and k[0] > resumed)
                for key in lost:
                    del table[key]
                if table is self.steps:
                    self._say_abandoned(segment, resumed, lost)

    def _say_abandoned(self, segment: int, resumed: Any, lost: list[tuple[int, str]]) -> None:
        if lost:
            self.problem(
                f"segment {segment} resumed from step {resumed}: {len(lost)} earlier step lines "
                f"(steps {lost[0][0]} to {lost[-1][0]}) have not been run again and are left out."
            )
