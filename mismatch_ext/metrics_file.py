"""Writes what a run measures: one file for each segment, `metrics-000.jsonl`, `metrics-001.jsonl`, and so on.

`mismatch_ext.log_reading` documents the lines. Each line is written by one call, so that a killed run leaves at most a torn last
line. A file is never opened again: whoever resumes a run begins the next one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from mismatch_ext.config import MonitorConfig
from mismatch_ext.errors import RecordError, RunDirectoryError
from mismatch_ext.log_reading import SCHEMA, Segment, number_of_segment, segment_files

logger = logging.getLogger(__name__)

LOST = "lines_lost"
"""Name of the event that says how many lines before it are missing, because they could not be written."""


def run_folder(monitor: MonitorConfig, output: Path) -> Path:
    """Return the folder of a run's metrics, by default `mismatch` in the host's output folder."""
    return Path(monitor.run_dir).expanduser() if monitor.run_dir else output / "mismatch"


def ensure_writable(run_dir: Path) -> None:
    """Check, before anything expensive starts, that metrics can be written; raises RunDirectoryError."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=run_dir):
            pass
    except OSError as error:
        raise _unwritable(run_dir, error) from error


class SegmentFile:
    """Writes the file of one segment. Create it with `SegmentFile.create`."""

    def __init__(self, fd: int, path: Path) -> None:
        self.path, self._fd = path, fd
        self.segment = number_of_segment(path)

    @classmethod
    def create(
        cls,
        run_dir: str | Path,
        *,
        header: Mapping[str, Any],
        of: Segment = "training",
        resume_step: int | None = None,
        first_segment: int | None = None,
    ) -> SegmentFile:
        """Create the next file of a folder and write its header; raises RunDirectoryError.

        Args:
            run_dir: The folder.
            header: What the host says of the run.
            of: What the segment is.
            resume_step: Last step of the checkpoint that a training resumes; None if it resumes none, and so begins another run.
            first_segment: Where the run that a training begins has its first segment, an evaluation; None if it is the training.
        """
        folder = Path(run_dir)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            earlier = segment_files(folder)
            number = number_of_segment(earlier[-1]) + 1 if earlier else 0
            path = folder / f"metrics-{number:03}.jsonl"
            fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except (OSError, ValueError) as error:
            raise _unwritable(folder, error) from error

        now = datetime.now(UTC).isoformat(timespec="seconds")
        opening: dict[str, Any] = {"kind": "header", "segment": number, "schema": SCHEMA, "time": now, "of": of}
        if resume_step is not None:
            opening["resume_step"] = resume_step
        elif of == "training":
            opening["first_segment"] = number if first_segment is None else first_segment
        file = cls(fd, path)
        try:
            file._write(opening | dict(header))
            if resume_step is not None:
                message = f"segment {number} continues from step {resume_step}"
                file.event(resume_step, "info", "resumed", message, {"resume_step": resume_step})
        except BaseException:
            file.close()
            path.unlink()
            raise
        return file

    def step(self, step: int, metrics: Mapping[str, float | None], split: str = "train") -> None:
        """Write the metrics of one optimizer step."""
        self._write({**self._at("step", step), "split": split, "metrics": dict(metrics)})

    def profile(self, step: int, profiles: Mapping[str, Mapping[str, Any]], split: str = "train") -> None:
        """Write the profiles of one step by name; each is a mapping of columns."""
        self._write({**self._at("profile", step), "split": split, "profiles": dict(profiles)})

    def scatter(self, step: int, *, old: Sequence[float], rollout: Sequence[float], split: str = "train") -> None:
        """Write a sample of tokens: their log-probabilities of both sides."""
        pair = {"rollout_logprobs": list(rollout), "old_logprobs": list(old)}
        self._write({**self._at("scatter", step), "split": split, **pair})

    def event(self, step: int, level: str, name: str, message: str, data: Mapping[str, Any] | None = None) -> None:
        """Write something that happened; `level` is info, warning or error."""
        event = {"level": level, "name": name, "message": message, "data": {} if data is None else data}
        self._write(self._at("event", step) | event)

    def end(self, step: int, status: str, message: str = "") -> None:
        """Write how the segment ended; `status` is completed or failed."""
        self._write(self._at("end", step) | {"status": status, "message": message})

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _at(self, kind: str, step: int) -> dict[str, Any]:
        return {"kind": kind, "segment": self.segment, "step": int(step)}

    def _write(self, line: dict[str, Any]) -> None:
        nonfinite: list[str] = []
        plain = _finite(line, "", nonfinite)
        if nonfinite:
            plain["nonfinite"] = nonfinite
        try:
            text = json.dumps(plain, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise RecordError(f"a {line['kind']} line cannot be written as JSON: {error}.") from error

        payload = text.encode("ascii") + b"\n"
        size = os.fstat(self._fd).st_size
        try:
            written = os.write(self._fd, payload)
        except OSError as error:
            raise _unwritable(self.path, error) from error
        if written != len(payload):
            # The next line must not be glued to half of this one.
            os.ftruncate(self._fd, size)
            raise RunDirectoryError(
                f"{self.path}: only {written} of {len(payload)} bytes of a line could be written, and they were taken back. Free "
                "disk space."
            )


def _finite(value: Any, path: str, nonfinite: list[str]) -> Any:
    """Return a value with None for numbers that are not finite, whose dotted paths are added to `nonfinite`."""
    if isinstance(value, Mapping):
        return {key: _finite(inner, f"{path}.{key}", nonfinite) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner, f"{path}.{index}", nonfinite) for index, inner in enumerate(value)]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        nonfinite.append(path.removeprefix(".metrics").removeprefix("."))
        return None
    # JSON would carry lone surrogates, which no file encoding has.
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def _unwritable(path: Path, error: OSError | ValueError) -> RunDirectoryError:
    reason = getattr(error, "strerror", None) or error
    return RunDirectoryError(
        f"{path} cannot be written: {reason}. Set mismatch.monitor.run_dir to a folder that can be written."
    )


class MetricsFile:
    """Writes the segments of one trainer. If a line cannot be written, the run goes on without it, and the next one tries again.

    Args:
        run_dir: The folder.
        header: Builds the header of a segment.
        step: Returns the number of finished optimizer steps.
        tell: Shows a warning to the user.
        writes: Whether this process writes; others only know which segment is open.
        begins_another: Told, once the file of a training that resumes none is open, how many files of earlier runs there are.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        header: Callable[[], Mapping[str, Any]],
        step: Callable[[], int],
        tell: Callable[[str], None],
        writes: bool,
        begins_another: Callable[[int], None],
    ) -> None:
        self.run_dir = run_dir
        self.open_segment: Segment | None = None
        """What the segment is that has not ended yet."""
        self._header, self._step, self._tell, self._writes = header, step, tell, writes
        self._begins_another = begins_another
        self._file: SegmentFile | None = None
        self._resume_step: int | None = None
        self._first_segment: int | None = None  # of the run that the next training begins
        self._early_events: list[tuple[Any, ...]] = []
        self._lost = 0  # lines since the last one that could be written

    def begin(self, of: Segment, resume_step: int | None = None) -> None:
        """Begin a segment; `resume_step` is the last step of the checkpoint that a training resumes."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self.open_segment, self._resume_step = of, resume_step
        if self._writes:
            with self.writing():
                self.opened()

    def event(self, *event: Any) -> None:
        """Write an event, with the arguments of `SegmentFile.event`; before the first segment, keep it until there is one."""
        if self._file is None:
            self._early_events.append(event)
            return
        with self.writing():
            self._file.event(*event)

    def end(self, step: int, status: str, message: str) -> None:
        """End the segment; what happens before the next one begins is still written to it."""
        self.open_segment = None
        if self._file is not None:
            with self.writing():
                self._file.end(step, status, message)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Write lines to the `opened` file: warn of the first that cannot be written, and count those that are lost."""
        try:
            yield
        except RunDirectoryError as error:
            self._lost += 1
            if self._lost == 1:
                with contextlib.suppress(OSError):  # the terminal's own disk may be full, too
                    self._tell(
                        f"{error} The run goes on and its alarms stay on; what it measures meanwhile is not in the file."
                    )
            return
        self._say_what_was_lost()

    def opened(self) -> SegmentFile:
        """Return the open file; what is logged outside of trainings and evaluations opens a segment that has no end."""
        if self._file is not None:
            return self._file
        of = self.open_segment or "evaluation"
        file = SegmentFile.create(
            self.run_dir,
            header=self._header(),
            of=of,
            resume_step=self._resume_step,
            first_segment=self._first_segment,
        )
        self._file = file
        if of == "training":
            earlier = file.segment if self._first_segment is None else self._first_segment
            if self._resume_step is None and earlier:
                self._begins_another(earlier)
            self._first_segment = None
        elif self._first_segment is None:
            self._first_segment = file.segment  # an evaluation goes with the training that may follow
        early, self._early_events = self._early_events, []
        for event in early:
            self.event(*event)
        return file

    def _say_what_was_lost(self) -> None:
        if not self._lost or self._file is None:
            return
        message = f"{self._lost} lines before this one could not be written, so that steps or events are missing"
        with contextlib.suppress(RunDirectoryError):
            self._file.event(self._step(), "warning", LOST, message, {"lines": self._lost})
            self._lost = 0
