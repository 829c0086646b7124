"""Read a run directory back: whatever is well-formed is data, everything else is a sentence in `problems`.

The line format is documented in `mismatch_ext.stream`, which writes it. A run may have been killed, resumed,
truncated or damaged; reading never raises for the content of the file, only for a file that is not there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mismatch_ext.errors import RunDirectoryError
from mismatch_ext.rundata.data import EndRecord, EventRecord, ProfileRecord, RunData, ScatterRecord, StepRecord
from mismatch_ext.rundata.lines import (
    ENDED,
    LEVELS,
    SCHEMA,
    SPLIT_PATTERN,
    STATUSES,
    finite,
    integer,
    is_number,
    is_resume_step,
    logprobs,
    parse_line,
    profile,
    short,
    text_of,
)

METRICS_FILE = "metrics.jsonl"
RUN_FOLDER = "mismatch"
"""Sub-folder of its own output folder in which a host writes the run directory."""


def _run_of(folder: Path) -> Path | None:
    """Return the run directory of a folder: the folder itself, or its sub-folder `mismatch` if it is a host's output folder."""
    return next((path for path in (folder, folder / RUN_FOLDER) if (path / METRICS_FILE).is_file()), None)


def find_runs(directory: str | Path) -> dict[str, Path]:
    """Find the run directories at a path: the folder itself, otherwise its direct sub-folders; or the `mismatch` folders in them.

    Returns:
        Name -> path of every folder that holds a `metrics.jsonl`, sorted by name. A folder `mismatch` in a trainer's output
        folder goes by the name of the output folder.

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

    Lines of the same segment, step and split are merged. A later segment's line replaces an earlier segment's. Earlier
    lines beyond the step that a later segment resumed from are left out.

    Returns:
        The data, with one sentence in `problems` for every line or value that could not be used.

    Raises:
        RunDirectoryError: `metrics.jsonl` is missing or cannot be read.
    """
    reader, number = _Reader(), 0
    path = Path(run_dir) / METRICS_FILE
    try:
        lines = path.open("rb")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RunDirectoryError(f"{path} cannot be read: {reason}; give a folder that holds {METRICS_FILE}.") from error
    with lines:
        for number, line in enumerate(lines, start=1):
            reader.add(number, line.removesuffix(b"\n"), torn=not line.endswith(b"\n"))
    if not number:
        reader.problem(f"{METRICS_FILE} is empty: the run stopped before it wrote its header.")
    return reader.finish(Path(run_dir))


@dataclass
class _Reader:
    """Collects the data of one file, line by line."""

    headers: list[dict[str, Any]] = field(default_factory=list)
    steps: dict[tuple[int, str], StepRecord] = field(default_factory=dict)
    profiles: dict[tuple[int, str], ProfileRecord] = field(default_factory=dict)
    scatters: dict[tuple[int, str], ScatterRecord] = field(default_factory=dict)
    events: list[EventRecord] = field(default_factory=list)
    ends: list[EndRecord] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def problem(self, text: str) -> None:
        """Keep a sentence on a line or value that could not be used."""
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
                    f"line {number}: schema {short(line.get('schema'))} is not {SCHEMA}; "
                    "another release of mismatch-ext may have written this run."
                )
            self.headers.append({**line, "segment": integer(line, "segment")})
            return
        if kind not in ("step", "profile", "scatter", "event", "end"):
            raise ValueError(f"unknown kind {short(kind)}")
        at: dict[str, Any] = {"segment": integer(line, "segment"), "step": integer(line, "step")}
        self._undo_evaluation(line, at["segment"])
        if kind == "event":
            at |= {"level": text_of(line, "level", LEVELS), "name": text_of(line, "name")}
            self.events.append(EventRecord(**at, message=text_of(line, "message"), data=line.get("data")))
        elif kind == "end":
            at |= {"status": text_of(line, "status", STATUSES), "message": text_of(line, "message")}
            at["of"] = text_of(line, "of", ENDED) if "of" in line else ENDED[0]
            if not (at["of"] == "evaluation" and self._evaluated(at["segment"])):
                self.ends.append(EndRecord(**at))
        else:
            self._add_measured(number, kind, line, {**at, "split": text_of(line, "split", SPLIT_PATTERN)})

    def _undo_evaluation(self, line: dict[str, Any], segment: int) -> None:
        """Remove an evaluation's end if a line follows; remove the end of a failed evaluation only if a training follows."""
        trains = line.get("split") == "train" or (line["kind"], line.get("name")) == ("event", "training")
        if self._evaluated(segment) and (self.ends[-1].status == "completed" or trains):
            self.ends.pop()

    def _evaluated(self, segment: int) -> bool:
        """Whether the last end is that of an evaluation in this segment."""
        return bool(self.ends) and (self.ends[-1].of, self.ends[-1].segment) == ("evaluation", segment)

    def _add_measured(self, number: int, kind: str, line: dict[str, Any], at: dict[str, Any]) -> None:
        key = (at["step"], at["split"])
        table: dict[tuple[int, str], Any] = getattr(self, f"{kind}s")
        before = table.get(key)
        if before is not None and before.segment > at["segment"]:
            return  # the process of an older segment was not dead yet
        if kind == "step":
            record = StepRecord(**at, metrics=self._metrics(number, line))
            if before is not None and before.segment == record.segment:
                record = replace(record, metrics={**before.metrics, **record.metrics})
            self.steps[key] = record
        elif kind == "profile":
            profiles = line.get("profiles")
            if not isinstance(profiles, dict):
                raise ValueError(f"profiles is {short(profiles)}, not an object")
            checked = {name: profile(name, value) for name, value in profiles.items()}
            self.profiles[key] = ProfileRecord(**at, profiles=checked)
        else:
            rollout, old = logprobs(line, "rollout_logprobs"), logprobs(line, "old_logprobs")
            if len(rollout) != len(old):
                raise ValueError(f"scatter has {len(rollout)} rollout and {len(old)} trainer log-probabilities")
            self.scatters[key] = ScatterRecord(**at, rollout_logprobs=rollout, old_logprobs=old)

    def _metrics(self, number: int, line: dict[str, Any]) -> dict[str, float | None]:
        metrics = line.get("metrics")
        if not isinstance(metrics, dict):
            raise ValueError(f"metrics is {short(metrics)}, not an object")
        kept: dict[str, float | None] = {}
        for name, value in metrics.items():
            if type(value) is float:  # nearly all
                kept[name] = value if math.isfinite(value) else None
            elif value is None or is_number(value):
                kept[name] = None if value is None else finite(value)
            else:
                self.problem(f"line {number}: metric {name!r} was left out: {short(value)} is no number.")
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
        """Leave out the records of a killed segment after the checkpoint that a later segment resumed from."""
        for header in self.headers:
            segment, resumed = header["segment"], header.get("resume_step")
            if not is_resume_step(resumed):
                continue
            tables: tuple[dict[tuple[int, str], Any], ...] = (self.steps, self.profiles, self.scatters)
            for table in tables:
                lost = sorted(k for k, r in table.items() if r.segment < segment and k[0] > resumed)
                for key in lost:
                    del table[key]
                if table is self.steps and lost:
                    self.problem(
                        f"segment {segment} resumed from step {resumed}: {len(lost)} earlier step lines "
                        f"(steps {lost[0][0]} to {lost[-1][0]}) have not been run again and are left out."
                    )
