"""The run directory: an append-only `metrics.jsonl` that survives `kill -9`.

Each line is one strict JSON object, written with a single write call, so a killed run leaves at most a torn
last line. A resumed run cuts that line off and appends a new segment; complete lines are never rewritten.

    header   {"kind", "schema": 1, "segment", "time", ["resume_step"], "run": {"name", "host"},
              "names": {role: name in the log}, "trainer": {"dtype", ...}, "engine": {"dtype", ...},
              "patches": [{"name", "target", "digest"}], "config": {...}, "versions": {package: version}}
    step     {"kind", "segment", "step", "split", "metrics": {name: number or null}, ["nonfinite": [name]]}
    profile  {"kind", "segment", "step", "split", "profiles": {"position": {...}, "probability": {...}}}
    scatter  {"kind", "segment", "step", "split", "rollout_logprobs": [...], "old_logprobs": [...]}
    event    {"kind", "segment", "step", "level", "name", "message", "data"}
    end      {"kind", "segment", "step", "status", "message", ["of": "evaluation"]}

`split` is "train" or "eval/<name>". A NaN or infinite number is written as null and named in `nonfinite`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from mismatch_ext.errors import RecordError, RunDirectoryError
from mismatch_ext.rundata import METRICS_FILE, RunData, find_runs, parse_line, read_run
from mismatch_ext.rundata.lines import ENDED, LEVELS, MAX_STEP, SCHEMA, SPLIT_PATTERN, STATUSES

__all__ = ["METRICS_FILE", "SCHEMA", "RunData", "RunStream", "find_runs", "read_run"]

SEGMENT = re.compile(rb'"segment"\s*:\s*(\d{1,17})')
RESERVED_HEADER_KEYS = ("kind", "schema", "segment", "time", "resume_step", "nonfinite")


class RunStream:
    """Writes one run directory. Create it with `RunStream.open`; a directory must have only one writer."""

    def __init__(self, fd: int, path: Path, segment: int, step: int) -> None:
        self.path = path
        self.segment = segment
        self._fd: int | None = fd
        self._last_step = step
        self._ended = False

    @classmethod
    def open(cls, run_dir: str | Path, *, header: Mapping[str, Any], resume_step: int | None = None) -> RunStream:
        """Start a run directory, or append a segment to an existing one.

        Args:
            run_dir: Folder to create or to continue.
            header: JSON-able description: `run`, `names`, `trainer`, `engine`, `patches`, `config`, `versions`.
            resume_step: Last optimizer step in the checkpoint that is resumed; None starts a new run.

        Raises:
            RecordError: The header holds a value that is not JSON-able, or a reserved key.
            RunDirectoryError: The folder cannot be written, or holds a run and `resume_step` is None.
        """
        for key in RESERVED_HEADER_KEYS:
            if key in header:
                raise RecordError(f"header key {key!r} is written by the stream itself; leave it out.")
        body, nonfinite = _jsonable(header, "header")
        resume = None if resume_step is None else _checked_step(resume_step, "resume_step")
        path = _make_directory(Path(run_dir)) / METRICS_FILE
        try:
            fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise _unwritable(path, error) from error
        try:
            segment, cut = _prepare(fd, path, resuming=resume is not None)
            stream = cls(fd, path, segment, resume or 0)
            line: dict[str, Any] = {"schema": SCHEMA, "time": datetime.now(UTC).isoformat(timespec="seconds")}
            if resume is not None:
                line["resume_step"] = resume
            stream._write("header", line | body | ({"nonfinite": nonfinite} if nonfinite else {}))
            if resume is not None:
                stream._note_resume(resume, cut)
        except BaseException:
            os.close(fd)
            raise
        return stream

    def step(self, step: int, metrics: Mapping[str, Any], split: str = "train") -> None:
        """Write the metrics of one optimizer step; Python and NumPy numbers, None for a missing value.

        Raises:
            RecordError: A value is not a number (the message names its key), or step or split is malformed.
        """
        values: dict[str, float | int | None] = {}
        nonfinite = []
        for name, value in metrics.items():
            number = value.item() if isinstance(value, np.generic) else value
            if not isinstance(name, str) or not isinstance(number, (int, float, type(None))):
                raise RecordError(
                    f"metric {name!r}: {type(value).__name__} {value!r} cannot be recorded; "
                    "give a Python or NumPy number (for a tensor, call .item())."
                )
            if isinstance(number, float) and not math.isfinite(number):
                nonfinite.append(name)
                number = None
            values[name] = int(number) if isinstance(number, bool) else number
        line: dict[str, Any] = {"split": _checked_split(split), "metrics": values}
        self._write("step", line | ({"nonfinite": nonfinite} if nonfinite else {}), step)

    def profile(self, step: int, profiles: Mapping[str, Any], split: str = "train") -> None:
        """Write the profiles of one step by name; each is a mapping of columns, or an object with `to_dict()`."""
        plain = {k: v if isinstance(v, Mapping) else _to_dict(k, v) for k, v in profiles.items()}
        body, _ = _jsonable(plain, "profiles")
        self._write("profile", {"split": _checked_split(split), "profiles": body}, step)

    def scatter(
        self,
        step: int,
        rollout_logprobs: Sequence[float],
        old_logprobs: Sequence[float],
        split: str = "train",
    ) -> None:
        """Write a sample of tokens: finite natural-log probabilities of both sides, in lists of equal length."""
        if len(rollout_logprobs) != len(old_logprobs):
            raise RecordError(
                f"scatter: {len(rollout_logprobs)} rollout_logprobs but {len(old_logprobs)} old_logprobs; "
                "give one pair per token."
            )
        pair = {"rollout_logprobs": list(rollout_logprobs), "old_logprobs": list(old_logprobs)}
        body, nonfinite = _jsonable(pair, "scatter")
        if nonfinite:
            raise RecordError(f"{nonfinite[0]} is not finite; give finite log-probabilities.")
        self._write("scatter", {"split": _checked_split(split), **body}, step)

    def event(self, step: int, level: str, name: str, message: str, data: Mapping[str, Any] | None = None) -> None:
        """Write something that happened; `level` is info, warning or error."""
        if level not in LEVELS:
            raise RecordError(f"event level {level!r} is not allowed; allowed: {', '.join(LEVELS)}.")
        body, nonfinite = _jsonable({} if data is None else data, "data")
        line: dict[str, Any] = {"level": level, "name": name, "message": message, "data": body}
        self._write("event", line | ({"nonfinite": nonfinite} if nonfinite else {}), step)

    def end(self, step: int, status: str, message: str = "", *, of: str = "training") -> None:
        """Write the line that says how the run ended; `status` is completed or failed, `of` training or evaluation."""
        if status not in STATUSES:
            raise RecordError(f"end status {status!r} is not allowed; allowed: {', '.join(STATUSES)}.")
        if of not in ENDED:
            raise RecordError(f"end of {of!r} is not allowed; allowed: {', '.join(ENDED)}.")
        line = {"status": status, "message": message}
        self._write("end", line if of == ENDED[0] else line | {"of": of}, step)
        self._ended = True

    def close(self) -> None:
        """Close the file; closing twice is harmless, writing afterwards is an error."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> RunStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write the end line if the block did not, and close."""
        try:
            if self._fd is not None and not self._ended:
                if kind is None:
                    self.end(self._last_step, "completed")
                else:
                    # A full disk must not hide the exception that is already on its way.
                    with contextlib.suppress(RunDirectoryError):
                        self.end(self._last_step, "failed", f"{kind.__name__}: {error}")
        finally:
            self.close()

    def _note_resume(self, resume_step: int, cut: bytes) -> None:
        if cut:
            self.event(
                resume_step,
                "warning",
                "recovered",
                f"cut off {len(cut)} bytes of a last line that the previous segment did not finish",
                {"text": cut[:200].decode("utf-8", "replace")},
            )
        what = f"segment {self.segment} continues from step {resume_step}"
        self.event(resume_step, "info", "resumed", what, {"resume_step": resume_step})

    def _write(self, kind: str, body: Mapping[str, Any], step: int | None = None) -> None:
        line: dict[str, Any] = {"kind": kind, "segment": self.segment}
        if step is not None:
            line["step"] = _checked_step(step, "step")
        if self._fd is None:
            raise RunDirectoryError(f"{self.path} is closed; open the run directory again with resume_step.")
        try:
            text = json.dumps(line | dict(body), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise RecordError(f"{kind} line cannot be written as JSON: {error}.") from error
        self._append(self._fd, text.encode("ascii") + b"\n")
        self._last_step = line.get("step", self._last_step)

    def _append(self, fd: int, payload: bytes) -> None:
        size = os.fstat(fd).st_size
        try:
            written = os.write(fd, payload)
        except OSError as error:
            raise _unwritable(self.path, error) from error
        if written != len(payload):
            os.ftruncate(fd, size)
            raise RunDirectoryError(
                f"{self.path}: only {written} of {len(payload)} bytes of a line could be written, and they "
                "were taken back; free disk space, then resume the run."
            )


def _make_directory(run_dir: Path) -> Path:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise RunDirectoryError(
            f"run directory {run_dir} cannot be created: a file is in its place; "
            "remove it or choose another `mismatch.monitor.run_dir`."
        ) from error
    except (OSError, ValueError) as error:
        raise _unwritable(run_dir, error) from error
    return run_dir


def _unwritable(path: Path, error: OSError | ValueError) -> RunDirectoryError:
    reason = getattr(error, "strerror", None) or str(error)
    return RunDirectoryError(
        f"{path} cannot be written: {reason}; choose a writable folder with `mismatch.monitor.run_dir`."
    )


def _prepare(fd: int, path: Path, *, resuming: bool) -> tuple[int, bytes]:
    """Return the new segment's number and the torn bytes that were cut off the end of the file."""
    size = os.fstat(fd).st_size
    if not size:
        return 0, b""
    if not resuming:
        raise RunDirectoryError(
            f"{path} already holds a run; choose another `mismatch.monitor.run_dir`, move the old folder "
            "away, or resume training from a checkpoint (resume_step)."
        )
    last, tail = -1, b""
    with open(fd, "rb", closefd=False) as file:
        for raw in file:
            # Parse only lines that may name a new segment: nearly all lines name a known one.
            if max(map(int, SEGMENT.findall(raw)), default=-1) > last:
                with contextlib.suppress(ValueError):
                    segment = parse_line(raw.removesuffix(b"\n")).get("segment")
                    last = max(last, segment if isinstance(segment, int) and segment <= MAX_STEP else -1)
            tail = b"" if raw.endswith(b"\n") else raw
    if not tail:
        return last + 1, b""
    try:
        parse_line(tail)
    except ValueError:
        os.ftruncate(fd, size - len(tail))
        return last + 1, tail
    # Only the newline is missing, so the line is complete, and cutting it off would lose a step.
    os.write(fd, b"\n")
    return last + 1, b""


def _checked_step(step: int, what: str) -> int:
    number = step.item() if isinstance(step, np.integer) else step
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= MAX_STEP:
        raise RecordError(f"{what} {step!r} is not allowed; allowed: an integer from 0 to 2**53.")
    return number


def _checked_split(split: str) -> str:
    if not isinstance(split, str) or not SPLIT_PATTERN.fullmatch(split):
        raise RecordError(f"split {split!r} is not allowed; allowed: 'train' or 'eval/<name>'.")
    return split


def _to_dict(name: str, profile: Any) -> Mapping[str, Any]:
    convert = getattr(profile, "to_dict", None)
    if convert is None:
        raise RecordError(f"profile {name!r}: {type(profile).__name__} is neither a mapping nor has to_dict().")
    columns: Mapping[str, Any] = convert()
    return columns


def _jsonable(value: Any, path: str) -> tuple[Any, list[str]]:
    """Return plain JSON data, with None for NaN and infinities, and the dotted paths of these."""
    nonfinite: list[str] = []

    def convert(item: Any, at: str) -> Any:
        if isinstance(item, np.generic):
            item = item.item()
        if item is None or isinstance(item, (str, bool, int)):
            return item
        if isinstance(item, float):
            if math.isfinite(item):
                return item
            nonfinite.append(at)
            return None
        if isinstance(item, Mapping):
            for key in item:
                if not isinstance(key, str):
                    raise RecordError(f"{at}: key {key!r} is {type(key).__name__}; JSON allows text keys only.")
            return {key: convert(inner, f"{at}.{key}") for key, inner in item.items()}
        if isinstance(item, (list, tuple)):
            return [convert(inner, f"{at}[{index}]") for index, inner in enumerate(item)]
        raise RecordError(
            f"{at}: {type(item).__name__} {item!r} cannot be written as JSON; "
            "give text, numbers, booleans, None, lists or mappings of them."
        )

    return convert(value, path), nonfinite
