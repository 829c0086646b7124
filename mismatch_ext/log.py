"""What a run says of itself: the metrics file, the lines at its start and end, and `RunLog`, through which every host writes.

`mismatch_ext.log_reading` documents the format. Each line is written by one call, so that a killed run leaves at most a torn last
line. A resumed run cuts that line off and appends a segment; complete lines are never rewritten.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mismatch_ext.alarms import ANEW, AlarmState, Rule, resumed, rules_of, unwatched, watch
from mismatch_ext.bad_rows import ALL, BadRows, BadRowWindow, Fault
from mismatch_ext.bad_rows import METRIC as BAD_ROWS_METRIC
from mismatch_ext.checks import METRIC, Checks
from mismatch_ext.closing import closing_lines
from mismatch_ext.config import MismatchConfig, MonitorConfig
from mismatch_ext.correction import masked_metrics, masked_sums
from mismatch_ext.drift import drift_metrics, drift_sums
from mismatch_ext.errors import MismatchError, RecordError, RunDirectoryError
from mismatch_ext.events import ALARM, BAD_ROW_REASONS, BAD_ROWS, EVIDENCE, WEIGHT_SYNC
from mismatch_ext.evidence import OF_BAD_ROWS, Evidence, HeldBatch, Kept, set_aside
from mismatch_ext.files import write_whole
from mismatch_ext.gap import gap_metrics, gap_profiles, gap_sample, gap_sums
from mismatch_ext.growth import Growth, grown
from mismatch_ext.log_reading import METRICS_FILE, SCHEMA, Segment, parse_line, read_run
from mismatch_ext.names import PREFIX, SHORT, HostNames, own_name
from mismatch_ext.precision.audit import AuditReport, EngineReading, TrainerReading
from mismatch_ext.prefix_cache import cache_metrics, cache_sums, no_cache_sums
from mismatch_ext.ranks import ONE_PROCESS, Ranks
from mismatch_ext.rollout import RolloutRecord, SamplingSettings
from mismatch_ext.states import from_json, state, to_json
from mismatch_ext.sums import Sums, merged, over_ranks, part, prefixed
from mismatch_ext.terminal import say_in_run
from mismatch_ext.versions import installed

logger = logging.getLogger(__name__)

PROFILE_EVERY = 5
"""Logs of the trainer between two records of the per-position and per-probability profiles."""
SCATTER_SAMPLES = 500
"""Tokens kept per profile record for the rollout-vs-trainer scatter."""
PROCESSES = 32
"""Number of low bits of a seed that tell processes apart."""

LOST = "lines_lost"
"""Name of the event that says how many lines before it are missing, because they could not be written."""
ALARMS_RAISED = PREFIX + "alarms_raised"
WEIGHT_SYNC_GAP = PREFIX + "weight_sync_gap"

_HEADER = re.compile(rb'\{"kind": "header", "segment": (\d+)')


# The file.


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


class RunStream:
    """Writes one segment of a metrics file. Create it with `RunStream.open`."""

    def __init__(self, fd: int, path: Path, segment: int) -> None:
        self.path, self.segment, self._fd = path, segment, fd
        self.start = os.fstat(fd).st_size
        """Size of the file in front of the segment."""

    @classmethod
    def open(
        cls,
        run_dir: str | Path,
        *,
        header: Mapping[str, Any],
        of: Segment = "training",
        resume_step: int | None = None,
        new_from: int | None = None,
    ) -> RunStream:
        """Append a segment; a training that resumes nothing first sets an earlier run's file aside. Raises RunDirectoryError.

        `new_from` is where in the file the new training's own segments start, its evaluations so far; None if it has none.
        """
        path = Path(run_dir) / METRICS_FILE
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if of == "training" and resume_step is None:
                _set_aside(path, new_from)
            fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except (OSError, ValueError) as error:
            raise _unwritable(path, error) from error
        try:
            segment, torn = _end_of(fd)
            stream = cls(fd, path, segment)
            now = datetime.now(UTC).isoformat(timespec="seconds")
            resumed = {} if resume_step is None else {"resume_step": resume_step}
            opening = {"kind": "header", "segment": segment, "schema": SCHEMA, "time": now, "of": of}
            stream._write(opening | resumed | dict(header))
            if torn:
                message = f"cut off {len(torn)} bytes of a last line that the previous segment did not finish"
                stream.event(
                    resume_step or 0, "warning", "recovered", message, {"text": torn[:200].decode("utf-8", "replace")}
                )
            if resume_step is not None:
                message = f"segment {segment} continues from step {resume_step}"
                stream.event(resume_step, "info", "resumed", message, {"resume_step": resume_step})
        except BaseException:
            os.close(fd)
            raise
        return stream

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
        try:
            text = json.dumps(plain | ({"nonfinite": nonfinite} if nonfinite else {}), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise RecordError(f"a {line['kind']} line cannot be written as JSON: {error}.") from error
        payload = text.encode("ascii") + b"\n"
        size = os.fstat(self._fd).st_size
        try:
            written = os.write(self._fd, payload)
        except OSError as error:
            raise _unwritable(self.path, error) from error
        if written != len(payload):
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


def _set_aside(path: Path, new_from: int | None) -> None:
    """Move the file of an earlier run aside, whoever may still write to it; what starts at `new_from` stays."""
    if new_from == 0 or not path.exists() or not path.stat().st_size:
        return
    number = 1
    while (aside := path.with_name(f"metrics-{number}.jsonl")).exists():
        number += 1
    new = b"" if new_from is None else path.read_bytes()[new_from:]
    path.rename(aside)
    set_aside(path.parent, number)
    if new:
        write_whole(path, new)
    logger.warning("%s holds an earlier run; it is kept as %s.", path, aside.name)


def _end_of(fd: int) -> tuple[int, bytes]:
    """Return the number of the next segment, and the torn bytes that were cut off the end of the file."""
    last, tail = -1, b""
    with open(fd, "rb", closefd=False) as file:
        for raw in file:
            if header := _HEADER.match(raw):
                last = max(last, int(header[1]))
            tail = b"" if raw.endswith(b"\n") else raw
    if not tail:
        return last + 1, b""
    try:
        parse_line(tail)
    except ValueError:
        os.ftruncate(fd, os.fstat(fd).st_size - len(tail))
        return last + 1, tail
    # Only the newline is missing, so the line is complete, and cutting it off would lose a step.
    os.write(fd, b"\n")
    return last + 1, b""


def _unwritable(path: Path, error: OSError | ValueError) -> RunDirectoryError:
    reason = getattr(error, "strerror", None) or error
    return RunDirectoryError(
        f"{path} cannot be written: {reason}. Set mismatch.monitor.run_dir to a folder that can be written."
    )


# The run's description, and the lines that a host prints.


def run_info(
    block: MismatchConfig,
    names: HostNames,
    *,
    trainer: TrainerReading,
    engine: EngineReading | None = None,
    sampling: SamplingSettings | None = None,
    patches: Sequence[Mapping[str, Any]] = (),
    audit: AuditReport | None = None,
    packages: Sequence[str] = (),
    more: Mapping[str, Any] | None = None,
    **run: Any,
) -> dict[str, Any]:
    """Return the header of a run's metrics file, with the same keys for every host; `run` is name, model, device and the like."""
    parts = {"trainer": trainer, "engine": engine, "sampling": sampling}
    return {
        "run": run,
        "names": names.to_dict(),
        **{name: None if part is None else dataclasses.asdict(part) for name, part in parts.items()},
        **(more or {}),
        "patches": [dict(patch) for patch in patches],
        "config": block.to_dict(),
        "acts": block.acts,
        "versions": {name: installed(name) or "not installed" for name in ("mismatch-ext", "torch", *packages)},
        "audit": None if audit is None else audit.to_dict(),
    }


def banner(
    block: MismatchConfig, header: Mapping[str, Any], rules: Mapping[str, Rule], run_dir: Path, *, verbose: bool = False
) -> str:
    """Return the lines at the start of a run: what both sides compute with, and a line for each section that is on.

    Args:
        block: The config of the run.
        header: The header of its metrics file.
        rules: The alarms that are watched.
        run_dir: The folder of the metrics file.
        verbose: Whether versions, and each patch with the function that it replaces, are shown too.
    """
    active = "is active on" if block.acts else "measures, and changes nothing in,"
    lines = [f"mismatch-ext {header['versions']['mismatch-ext']} {active} {header['run']['host']}"]
    for side in ("trainer", "engine"):
        reading = {name: value for name, value in (header[side] or {}).items() if name != "version"}
        lines.append(_line(side, reading or "none: the trainer's own model generates"))
    lines += section_lines(block)
    if header["audit"] is not None:
        lines.append(_line("audit", "both sides compute as asked: their dtypes were read back"))
    patches = header["patches"]
    if verbose:
        lines.append(_line("versions", header["versions"]))
        lines += [_line("patch", f"{patch['name']} on {patch['target']}") for patch in patches]
    elif patches:
        lines.append(_line("patches", f"{len(patches)}, named in {METRICS_FILE}"))
    return "\n".join([*lines, *alarm_lines(rules, run_dir)])


def section_lines(block: MismatchConfig) -> list[str]:
    """Return a line with the settings of each section that is on, alarms aside."""
    sections = {name: dict(keys) for name, keys in block.to_dict().items() if isinstance(keys, Mapping)}
    if block.kl is not None:
        sections["kl"]["placement"] = block.kl.applied_placement
    if block.correction is not None:
        preset = {"preset": sections["correction"].pop("preset")}
        off = {name: "off" for name, value in sections["correction"].items() if value is None}
        sections["correction"] = preset | sections["correction"] | off
    monitor = sections.get("monitor", {})
    for name in ("alarms", "default_alarms"):
        monitor.pop(name, None)
    # What happens after a failed check, or with bad rows, is worth a line also where the key is left out.
    weight_sync = block.monitor.weight_sync or ("error" if block.acts else "warn")
    ends = {"max_bad_rows": block.monitor.share_of_bad_rows} if block.acts else {}
    sections["monitor"] = {**monitor, "weight_sync": weight_sync, **ends}
    return [_line(name, keys) for name, keys in sections.items()]


def alarm_lines(rules: Mapping[str, Rule], run_dir: Path) -> list[str]:
    """Return the lines that say which alarms are watched, and where metrics are written."""
    named = [rule.describe() for rule in rules.values() if rule.named]
    if built_in := len(rules) - len(named):
        named.append(f"{built_in} built-in ones (docs/metrics.md)")
    return [_line("alarms", "; ".join(named) or "none"), _line("metrics", str(run_dir))]


def _line(name: str, text: str | Mapping[str, Any]) -> str:
    return f"  {name:<13} {text if isinstance(text, str) else ', '.join(_settings(text))}"


ON_FAILURE = {"error": "stop", "warn": "warn", "off": "no check"}


def _settings(settings: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield `key=value` for each setting that is set."""
    for key, value in settings.items():
        if key == "parameter_dtypes" and value:  # counts would not compare: a CPU engine packs most of its weights away
            yield f"parameters={' and '.join(value)}"
        elif isinstance(value, Mapping):
            yield from _settings(value, f"{prefix}{key}.")
        elif key == "weight_sync":
            yield f"weight check after each update, on failure: {ON_FAILURE[value]}"
        elif value is not None:
            yield f"{prefix}{key}={str(value).lower() if isinstance(value, bool) else value}"


# What every host writes through.


@dataclass(frozen=True, kw_only=True)
class Logged:
    """Result of a log: what was measured, the part of it to show, and the message of the alarm that stops training, or None."""

    metrics: dict[str, float]
    shown: dict[str, float]
    stop: str | None


@state
class LogState:
    """What a checkpoint holds of a log: counters that choose profiled steps and scattered tokens, and how the gaps have grown."""

    flushes: dict[str, int]
    created: int
    growth: Growth
    sync_growth: Growth = field(default_factory=Growth)
    bad_rows: BadRowWindow = field(default_factory=BadRowWindow)
    reasons_seen: dict[str, int] = field(default_factory=dict)


class RunLog:
    """Measurements, alarms and events of one trainer; every rank has one, and the main process writes. Raises RunDirectoryError.

    A host calls `begin`, for each step `observe` on its batches and then `log`, and `end`. `info` builds the header of a segment,
    as `run_info` does, and `step` returns the number of finished optimizer steps. `checks` decides whether a failed check ends
    the run; None ends it. `tell` shows a warning to the user; None logs it.
    """

    def __init__(
        self,
        block: MismatchConfig,
        run_dir: Path,
        *,
        info: Callable[[], dict[str, Any]],
        step: Callable[[], int],
        names: HostNames | None = None,
        ranks: Ranks = ONE_PROCESS,
        checks: Checks | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self.block, self.run_dir, self.ranks = block, run_dir, ranks
        self.checks = Checks(True, step) if checks is None else checks
        self._info, self._step = info, step
        self._tell = logger.warning if tell is None else tell
        routing = block.routing
        replays = routing is not None and routing.mode == "R3"
        self.rules = rules_of(block.monitor, names, replays=replays)
        self.alarms = AlarmState()
        self.stopped: str | None = None
        self._looked = False
        self._stream: RunStream | None = None
        self._segment: Segment | None = None
        self._resume_step: int | None = None  # of the segment
        self._new_from: int | None = None
        self._early_events: list[tuple[Any, ...]] = []
        self._sampling = SamplingSettings()
        self._gaps: dict[tuple[str, bool], Sums] = {}
        self._masked: dict[str, Sums] = {}
        self._cached: dict[str, Sums] = {}
        self._drift: Sums | None = None
        self._bad_rows: dict[str, Sums] = {}  # by split, since the last flush
        self._faults: dict[str, list[Fault]] = {}
        self._reasons_seen: Counter[str] = Counter()  # bad rows of this process's run so far, on all ranks
        self._bad_row_window = BadRowWindow()
        self._too_many: str | None = None
        self._flushes: dict[str, int] = {}
        self._created = 0
        self._growth = self._sync_growth = Growth()
        self._of_probes: dict[str, float] = {}
        self._lost = 0  # lines since the last one that could be written
        self.evidence: Evidence | None = None
        if ranks.rank == 0:
            ensure_writable(run_dir)
            if block.monitor.evidence:
                self.evidence = Evidence(run_dir, self.event, self._tell)
            self.checks.report_to(self._write_event)

    # The run.

    def begin(self, resume_step: int | None = None) -> None:
        """Open a segment for a training; `resume_step` is the last step of the checkpoint that it resumes.

        If the file cannot be opened, the run goes on, and the next line tries again.
        """
        self._open("training", resume_step)
        self._new_from = None
        if self.evidence is not None:
            self.evidence.begin()

    @contextlib.contextmanager
    def evaluation(self, step: int) -> Iterator[None]:
        """Write an evaluation of the weights after `step` steps as a segment of its own; within another segment, as its part."""
        if self._segment is not None:
            yield
            return
        self._open("evaluation")
        status, message = "completed", ""
        try:
            yield
        except BaseException as error:
            status, message = "failed", f"{type(error).__name__}: {error}"
            raise
        finally:
            self._close(step, status, message)

    def _open(self, of: Segment, resume_step: int | None = None) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        self._segment, self._resume_step = of, resume_step
        if self.ranks.rank == 0:
            with self._going_on():
                self._open_file(of, resume_step)

    def _open_file(self, of: Segment, resume_step: int | None) -> None:
        self._stream = RunStream.open(
            self.run_dir, header=self._info(), of=of, resume_step=resume_step, new_from=self._new_from
        )
        if self._new_from is None:
            self._new_from = self._stream.start
        early, self._early_events = self._early_events, []
        for event in early:
            self._write_event(*event)

    def _close(self, step: int, status: str, message: str) -> None:
        """End the segment; what happens before the next one begins is still written to it."""
        self._segment = None
        if self._stream is not None:
            with self._going_on():
                self._stream.end(step, status, message)

    @contextlib.contextmanager
    def _going_on(self) -> Iterator[None]:
        """Write a line of a run that goes on without it if the disk is full: warn of the first, and count those that are lost."""
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
        if not self._lost or self._stream is None:
            return
        message = f"{self._lost} lines before this one could not be written, so that steps or events are missing"
        with contextlib.suppress(RunDirectoryError):
            self._stream.event(self._step(), "warning", LOST, message, {"lines": self._lost})
            self._lost = 0

    def announce(self) -> None:
        """Print what both sides compute with, which sections are on, and which alarms are watched.

        If this package's loggers show the level INFO, versions and patches are printed too.
        """
        if self.ranks.rank == 0:
            verbose = logger.isEnabledFor(logging.INFO)
            say_in_run(banner(self.block, self._info(), self.rules, self.run_dir, verbose=verbose))

    def end(self, status: str, message: str = "", *, step: int | None = None) -> None:
        """Write what is left and how training ended ("completed" or "failed"; by default with the alarm that stopped it)."""
        if self._segment != "training":
            return
        at = self._step() if step is None else step
        if self.evidence is not None:
            self.evidence.measured(at)  # no other batch will come
        # With several ranks merging is a collective operation, and after a failure the other ranks may not take part.
        # What was logged last stays: counts of nothing would take the place of that step's own.
        if self.ranks.size == 1 and self._has_observed("train") and (left := self.flush("train", at)):
            self.write(at, left)
        self._close(at, status, message or self.stopped or "")
        if self.ranks.rank == 0:
            try:
                say_in_run("\n".join(closing_lines(read_run(self.run_dir))))
            except Exception:  # whatever it is: training has ended well, and what comes after it must not be lost
                logger.warning("The summary of the run cannot be printed.", exc_info=True)

    def event(
        self, level: str, name: str, message: str, data: dict[str, Any] | None = None, *, step: int | None = None
    ) -> None:
        """Write an event of the current step, or of `step`; before the first segment, keep it until that is open."""
        if self.ranks.rank == 0:
            self._write_event(self._step() if step is None else step, level, name, message, data)
        if self.evidence is not None and (name, level) == (WEIGHT_SYNC, "error"):
            self.evidence.await_batch(message)

    def _write_event(self, *event: Any) -> None:
        if self._stream is None:
            self._early_events.append(event)
            return
        with self._going_on():
            self._stream.event(*event)

    # The gap.

    def sampled_with(self, sampling: SamplingSettings) -> None:
        """Set the sampling settings of the tokens that are observed from now on."""
        self._sampling = sampling

    @contextlib.contextmanager
    def refusing(self, split: str, batch: HeldBatch) -> Iterator[None]:
        """Run a check of a batch; if it fails, rows of a training batch are kept as evidence, and the error goes on.

        Only the main process keeps rows, which are its own, and it waits for no other rank.
        """
        try:
            yield
        except MismatchError as error:
            if self.evidence is not None and split == "train":
                self.evidence.keep(batch.step + 1, f"{type(error).__name__}: {error}", batch)
            raise

    @contextlib.contextmanager
    def holding(self, split: str, batch: HeldBatch) -> Iterator[None]:
        """Measure a batch as under `refusing`, and hold it afterwards, so that an alarm of its step can keep rows of it."""
        with self.refusing(split, batch):
            yield
        if self.evidence is not None and split == "train":
            self.evidence.hold(batch)
            self.evidence.measured(batch.step + 1)

    def observe(self, split: str, *, old: Tensor, rollout: Tensor, mask: Tensor, native: bool = False) -> None:
        """Add a batch of `[B, T]` log-probabilities to a split; with `native`, of the trainer's own routing."""
        self._created += 1
        # Each rank and batch needs its own seed, because otherwise all of them would sample the same places.
        seed = self._created * self.ranks.size + self.ranks.rank
        self.merge(
            split, gap_sums(old=old, rollout=rollout, mask=mask, sample=SCATTER_SAMPLES, seed=seed), native=native
        )

    def merge(self, split: str, sums: Sums, *, native: bool = False) -> None:
        """Add what was measured on a batch, sums from `gap_sums` with the arguments of `part`."""
        before = self._gaps.get((split, native))
        self._gaps[split, native] = sums if before is None else merged(before, sums)

    def observe_cached(
        self, split: str, *, old: Tensor, rollout: Tensor, mask: Tensor, records: Sequence[RolloutRecord | None]
    ) -> None:
        """Add the gap of a batch apart for prompts from the engine's prefix cache; arguments as for `cache_sums`."""
        sums = cache_sums(old=old, rollout=rollout, mask=mask, records=records)
        self._cached[split] = merged(self._cached[split], sums) if split in self._cached else sums

    def mask(self, split: str, kept_mask: Tensor, response_mask: Tensor) -> None:
        """Add what a correction leaves of a batch; arguments as for `masked_sums`."""
        self.add_masked(split, masked_sums(kept_mask, response_mask))

    def add_masked(self, split: str, sums: Sums) -> None:
        """Add what a correction leaves of a batch, sums from `masked_sums`."""
        self._masked[split] = merged(self._masked[split], sums) if split in self._masked else sums

    def count_bad_rows(self, split: str, bad: BadRows, batch: HeldBatch | None = None) -> None:
        """Count the rows of a batch and those that are bad, and keep the first bad rows of training as evidence."""
        sums = bad.sums()
        self._bad_rows[split] = merged(self._bad_rows[split], sums) if split in self._bad_rows else sums
        firsts = bad.firsts()
        self._faults.setdefault(split, []).extend(firsts)
        if firsts and batch is not None and self.evidence is not None and split == "train":
            messages = " ".join(fault.message for fault in firsts)
            self.evidence.keep(batch.step + 1, messages, batch, most=OF_BAD_ROWS)

    def _flush_bad_rows(self, split: str, step: int, sums: Sums) -> dict[str, float]:
        """Return all ranks' bad rows since the last flush, by reason; say why, and note whether they are too many."""
        faults = self._faults.pop(split, [])
        counts = {reason: int(sums[reason]) for reason in BAD_ROW_REASONS}
        bad = sum(counts.values())
        if bad:
            # Words travel only if there is something to say, which every rank knows from the sums.
            self._tell_of_faults(step, counts, [fault for found in self.ranks.gather(faults) for fault in found])
        if split == "train" and int(sums[ALL]):
            self._bad_row_window = self._bad_row_window.after(step, bad, int(sums[ALL]))
            if self.checks.acts:
                self._too_many = self._bad_row_window.too_many(self.block.monitor.share_of_bad_rows)
        # A reason is logged from its first row on, so that a clean run has no such metrics.
        return {
            BAD_ROWS_METRIC + reason: float(counts[reason]) for reason in BAD_ROW_REASONS if self._reasons_seen[reason]
        }

    def _tell_of_faults(self, step: int, counts: Mapping[str, int], faults: Sequence[Fault]) -> None:
        """Write one message for each reason that has bad rows now, and warn of the first of each."""
        for reason, count in counts.items():
            if not count:
                continue
            first = not self._reasons_seen[reason]
            self._reasons_seen[reason] += count
            message = next((fault.message for fault in faults if fault.reason == reason), BAD_ROW_REASONS[reason])
            left_out = (
                "Their loss weight is 0"
                if self.checks.acts
                else "The config only measures, so that they are trained on"
            )
            sentence = (
                f"{count} bad rows ({reason}) before step {step}, such as: {message} {left_out}; the run goes on."
            )
            self.event("warning", BAD_ROWS, sentence, {"reason": reason, "rows": count}, step=step)
            if first and self.ranks.rank == 0:
                self._tell(f"mismatch: {sentence} mismatch/{BAD_ROWS_METRIC}{reason} counts them.")

    def part(self) -> dict[str, int]:
        """Return the arguments `sample` and `seed` of `gap_sums` in other processes; each adds its number to the seed."""
        self._created += 1
        return {"sample": SCATTER_SAMPLES, "seed": self._created << PROCESSES}

    def follow_versions(self) -> None:
        """From now on, separate drift from numerics in the train split; either all ranks must call this or none."""
        nothing = torch.zeros(0, 0)
        self._drift = drift_sums(old=nothing, rollout=nothing, mask=nothing, versions=nothing.long(), scoring=0)

    @property
    def follows_versions(self) -> bool:
        """Whether `follow_versions` was called."""
        return self._drift is not None

    def add_drift(self, sums: Sums) -> None:
        """Add what was measured of stale rollouts, sums from `drift_sums`; versions must be followed."""
        assert self._drift is not None
        self._drift = merged(self._drift, sums)

    def flush(self, split: str, step: int) -> dict[str, float]:
        """Return a split's metrics since the last flush, over all ranks, with prefix; write its profiles when they are due."""
        sums = over_ranks(self._take(split), self.ranks)
        truncated = self._sampling.truncates_support
        scalars, native = (gap_metrics(part(sums, of), support_truncated=truncated) for of in ("gap", "native"))
        scalars |= {f"native/{name}": value for name, value in native.items()}
        scalars |= masked_metrics(part(sums, "masked")) | cache_metrics(part(sums, "cache"))
        if drift := part(sums, "drift"):
            scalars |= drift_metrics(drift, support_truncated=truncated)
        scalars |= self._flush_bad_rows(split, step, part(sums, "bad_rows"))
        if "tokens" not in scalars:  # no gap was measured, which is no log to draw or to ask for growth
            return {PREFIX + name: value for name, value in scalars.items()}
        count = self._flushes.get(split, 0)
        self._flushes[split] = count + 1
        if self.ranks.rank == 0 and (split != "train" or count % PROFILE_EVERY == 0):
            with self._going_on():
                self._file().profile(step, gap_profiles(part(sums, "gap")), split)
            scatter = gap_sample(part(sums, "gap"))
            with self._going_on():
                self._file().scatter(
                    step, old=scatter["old_logprobs"], rollout=scatter["rollout_logprobs"], split=split
                )
        # Where versions are followed, only the numerics part is asked whether it grows.
        of = "numerics/" if drift else ""
        if split == "train" and (k3 := scalars.get(f"{of}k3_kl")) is not None:
            self._growth, growth = grown(self._growth, step, k3)
            scalars |= {of + name: value for name, value in growth.items()}
        return {PREFIX + name: value for name, value in scalars.items()}

    def _has_observed(self, split: str) -> bool:
        """Return whether this rank has observed anything of a split since the last flush."""
        gaps = any(of == split for of, _ in self._gaps)
        return gaps or split in self._masked or split in self._bad_rows

    def _take(self, split: str) -> Sums:
        """Return what this rank observed since the last flush, with the same names on all ranks."""
        nothing = torch.zeros(0, 0)
        sums: Sums = {}
        for name, native in (("gap", False), ("native", True)):
            gap = self._gaps.pop((split, native), None)
            if gap is None:
                gap = gap_sums(old=nothing, rollout=nothing, mask=nothing, sample=SCATTER_SAMPLES)
            sums |= prefixed(name, gap)
        masked = self._masked.pop(split, None)
        sums |= prefixed("masked", masked_sums(nothing, nothing) if masked is None else masked)
        sums |= prefixed("cache", self._cached.pop(split, no_cache_sums()))
        bad_rows = self._bad_rows.pop(split, None)
        sums |= prefixed("bad_rows", BadRows(0).sums() if bad_rows is None else bad_rows)
        if split == "train" and self._drift is not None:
            sums |= prefixed("drift", self._drift)
            self.follow_versions()
        return sums

    # A step.

    def log(self, step: int, metrics: Mapping[str, Any], split: str = "train") -> Logged:
        """Write the host's metrics with those measured since the last log, and raise alarms for "train"; on all ranks."""
        measured, stop = self.measured(step, split), None
        if split == "train":
            stop = self.watch(step, {**metrics, **measured})
            measured |= self.raised()
        self.write(step, {**metrics, **measured}, split)
        return Logged(metrics=measured, shown=self.shown(measured), stop=stop)

    def measured(self, step: int, split: str = "train") -> dict[str, float]:
        """Return the metrics of all ranks' tokens observed since the last call; for "train", the failed checks so far too."""
        metrics = self.flush(split, step)
        if split == "train":
            metrics |= {PREFIX + name: value for name, value in self.checks.metrics().items()}
        return metrics

    def raised(self) -> dict[str, float]:
        """Return the number of alarms that are raised, and the growth of the probes' gap, which the main process knows."""
        if self.ranks.rank != 0:
            return {}
        return {ALARMS_RAISED: float(len(self.alarms.raised)), **self._of_probes}

    def shown(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Return what consoles and loggers get: of this package's metrics those that the block asks for, and all others."""
        if self.block.monitor.metrics == "all":
            return dict(metrics)
        named = {name for rule in self.rules.values() if rule.named for name in rule.logged}
        return {name: value for name, value in metrics.items() if name in named or _in_short(name)}

    def write(self, step: int, metrics: Mapping[str, Any], split: str = "train") -> None:
        """Write those of the metrics that are numbers, or None."""
        plain = {name: _plain(value) for name, value in metrics.items()}
        numbers = {name: value for name, value in plain.items() if value is None or isinstance(value, (int, float))}
        if self.ranks.rank == 0 and numbers:
            with self._going_on():
                self._file().step(step, numbers, split)

    def _file(self) -> RunStream:
        """Return the open segment; what is logged outside of trainings and evaluations opens one that has no end."""
        if self._stream is None:
            self._open_file(self._segment or "evaluation", self._resume_step)
        assert self._stream is not None
        return self._stream

    def watch(self, step: int, metrics: Mapping[str, Any]) -> str | None:
        """Raise the alarms of a training log, and return the message of an alarm that stops training; all ranks must call it."""
        return self.decided(self.look(step, metrics))

    def look(self, step: int, metrics: Mapping[str, Any]) -> str | None:
        """Raise the alarms of a training log in the main process; return the message of one that stops training."""
        stop = None
        if self.ranks.rank == 0:
            with self.checks.checking("alarms"):
                stop = self._watch(step, metrics)
        return stop

    def decided(self, stop: str | None) -> str | None:
        """Return on every rank what `look` returned in the main process; all ranks must call it."""
        if self.ranks.size > 1 and any(rule.action == "stop" for rule in self.rules.values()):
            # A metric may differ between ranks, and if one rank stopped by itself the others would wait for it.
            stops = self.ranks.sum(torch.tensor(float(stop is not None)))
            stop = self.ranks.gather(stop)[0] if bool(stops) else None
        if self._too_many is not None:  # which every rank knows
            stop = stop or self._too_many
            last, *_ = self._bad_row_window.logs[-1]
            self._bad_row_window, self._too_many = BadRowWindow(since=last), None  # a resumed run counts anew
        self.stopped = self.stopped if stop is None else stop
        return stop

    def _watch(self, step: int, metrics: Mapping[str, Any]) -> str | None:
        if not self._looked:
            # Done at the first log, so that the user need not wait for the end of training.
            self._looked = True
            for metric, message in unwatched(self.rules, metrics).items():
                self.event("warning", "unwatched", message, {"metric": metric}, step=step)
                self._tell(message)
        stop = None
        self._of_probes = self._growth_of_probes(step, metrics)
        self.alarms, alarms = watch(self.alarms, {**metrics, **self._of_probes}, self.rules, step)
        kept = self._kept_for([alarm.message for alarm in alarms if alarm.status == "raised"], step)
        for alarm in alarms:
            self.event(alarm.level, ALARM, alarm.message, dataclasses.asdict(alarm), step=step)
            if alarm.status == "raised":
                self._tell(alarm.message if kept is None else f"{alarm.message} {kept.sentence()}")
                kept = None  # it is said once
            if alarm.stops:
                stop = alarm.message
        if self._too_many is not None:
            rows = {"reason": None, "rows": self._bad_row_window.bad}
            self.event("error", BAD_ROWS, self._too_many, rows, step=step)
            self._tell(f"mismatch: {self._too_many}")
        return stop

    def _kept_for(self, alarms: Sequence[str], step: int) -> Kept | None:
        """Keep rows of the batch that alarms were raised about; None if nothing was kept."""
        if self.evidence is None or not alarms:
            return None
        return self.evidence.keep(step, " ".join(alarms))

    def saved(self, checkpoint: Path) -> None:
        """Say which checkpoint an alarm that stops training has saved, and how to examine with it what was kept."""
        if self.stopped is None or self.ranks.rank != 0:
            return
        message, data = f"the alarm that stops training saved {checkpoint}.", {"checkpoint": str(checkpoint)}
        kept = None if self.evidence is None else self.evidence.last
        # Rows of an earlier alarm are of other weights than this checkpoint's.
        if kept is not None and kept.step + 1 >= self._step():
            data |= {"path": str(kept.path), "command": kept.command(checkpoint)}
            message += f" To examine the rows that were kept: {data['command']}"
        self.event("info", EVIDENCE, message, data)
        self._tell(message)

    def _growth_of_probes(self, step: int, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Return how much the gap of the probes has grown over the last logs; nothing where no update was verified."""
        gap = _plain(metrics.get(WEIGHT_SYNC_GAP))
        if not isinstance(gap, (int, float)):
            return {}
        self._sync_growth, growth = grown(self._sync_growth, step, float(gap), "weight_sync")
        return {PREFIX + name: value for name, value in growth.items()}

    # What a checkpoint holds.

    def begin_anew(self) -> None:
        """Forget the alarms of an earlier training of this trainer; those of a checkpoint are loaded afterwards."""
        self.alarms = AlarmState()
        self.stopped, self._looked = None, False
        self._bad_row_window, self._too_many = BadRowWindow(), None
        self._reasons_seen.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of alarms and log as JSON-able data, under the keys of a checkpoint."""
        log = LogState(
            flushes=dict(self._flushes),
            created=self._created,
            growth=self._growth,
            sync_growth=self._sync_growth,
            bad_rows=self._bad_row_window,
            reasons_seen=dict(self._reasons_seen),
        )
        return {"monitor": to_json(self.alarms), "log": to_json(log)}

    def load_state_dict(self, state: Mapping[str, Any], *, step: int) -> None:
        """Continue from a checkpoint of `step`, which may lack parts, and say which alarms begin anew; raises RecordError."""
        self.begin_anew()
        if state.get("log") is not None:
            log = from_json(LogState, state["log"], "log")
            self._flushes, self._created = dict(log.flushes), log.created
            self._growth, self._sync_growth = log.growth, log.sync_growth
            self._bad_row_window = log.bad_rows
            self._reasons_seen.update(log.reasons_seen)
        if state.get("monitor") is not None:
            self.alarms, notes = resumed(state["monitor"], self.rules)
            for message, metrics in notes:
                self.event("info", ANEW, message, {"metrics": metrics}, step=step)
                self._tell(message)


def _in_short(name: str) -> bool:
    """Return whether a metric is another's, one of the short list, or a count of failed checks or bad rows."""
    ours = own_name(name)
    return ours is None or ours in SHORT or ours.startswith((METRIC, BAD_ROWS_METRIC))


def _plain(value: Any) -> Any:
    """Return the number in a tensor without dimensions or a numpy scalar, and of a bool; return any other value as it is."""
    value = value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value
    return int(value) if isinstance(value, bool) else value
