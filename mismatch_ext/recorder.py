"""Accumulates the gap between rollout and trainer, and writes it to the run directory."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from mismatch_ext.config import MonitorConfig
from mismatch_ext.errors import RecordError, RunDirectoryError
from mismatch_ext.host_names import PREFIX as PREFIX
from mismatch_ext.metrics import MismatchAccumulator, MismatchSummary
from mismatch_ext.metrics.growth import Growth
from mismatch_ext.records import SamplingSettings
from mismatch_ext.rundata import read_run
from mismatch_ext.staleness import StaleGap
from mismatch_ext.staleness.gap import ENOUGH
from mismatch_ext.stream import METRICS_FILE, RunStream

logger = logging.getLogger(__name__)

PROCESSES = 32
"""Number of low bits of a seed that tell processes apart."""


def run_folder(monitor: MonitorConfig, output: Path) -> Path:
    """Return the folder of a run's metrics.

    Args:
        monitor: The `monitor` section; a `~` in front of its `run_dir` is the home folder.
        output: The host's output folder.

    Raises:
        RunDirectoryError: `run_dir` names the home folder of a user who does not exist.
    """
    if not monitor.run_dir:
        return output / "mismatch"
    try:
        return Path(monitor.run_dir).expanduser()
    except RuntimeError as error:
        raise RunDirectoryError(
            f"mismatch.monitor.run_dir={monitor.run_dir!r}: {error} Give the whole path."
        ) from error


def ensure_writable(run_dir: Path) -> None:
    """Check, before anything expensive starts, that metrics can be written.

    Raises:
        RunDirectoryError: The folder cannot be created or written; names it and says what to do.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=run_dir):
            pass
    except OSError as error:
        raise RunDirectoryError(
            f"run directory {run_dir} is not writable: {error.strerror or error}. Set mismatch.monitor.run_dir to a folder that "
            "can be written."
        ) from error


def _set_aside(metrics: Path) -> Path | None:
    """Move the metrics of an earlier run aside, so that a new run does not overwrite them; return the new path."""
    if not metrics.exists() or not metrics.stat().st_size:
        return None
    number = 1
    while (aside := metrics.with_name(f"metrics-{number}.jsonl")).exists():
        number += 1
    metrics.rename(aside)
    logger.warning("%s holds an earlier run; it is kept as %s.", metrics, aside.name)
    return aside


class RunRecorder:
    """Records the gap of one trainer; every rank accumulates, and the main process writes.

    Args:
        run_dir: Folder of `metrics.jsonl`.
        monitor: The `monitor` section.
        sampling: Settings that the engine samples with.
        header: Builds the header of a stream segment; called when the first line is written.
        rank: Rank of this process; rank 0 writes.
        world_size: Number of ranks whose accumulators are merged.
        gather: Collects the lists of all ranks into one list; needed with more than one rank.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        monitor: MonitorConfig,
        sampling: SamplingSettings,
        header: Callable[[], dict[str, Any]],
        rank: int,
        world_size: int,
        gather: Callable[[list[Any]], list[Any]] | None = None,
    ) -> None:
        self.run_dir = run_dir
        self.monitor = monitor
        self.sampling = sampling
        self._header = header
        self._rank = rank
        self._is_main_process = rank == 0
        self._world_size = world_size
        self._gather = gather
        self._stream: RunStream | None = None
        self._aside: Path | None = None
        self._started = self._begun = self._evaluating = self._evaluated = False
        self._created = 0
        self._early_events: list[tuple[Any, ...]] = []
        self._accumulators: dict[tuple[str, bool], MismatchAccumulator] = {}
        self._stale: StaleGap | None = None
        self._flushes: dict[str, int] = {}
        self._growth = Growth()

    def state_dict(self) -> dict[str, Any]:
        """Return the gap's growth, and the counters that choose profiled steps and scattered tokens, as JSON-able data."""
        return {"flushes": dict(self._flushes), "created": self._created, "growth": self._growth.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned, so that a resumed run draws what it would have drawn.

        Raises:
            RecordError: The state is damaged.
        """
        flushes, created = state.get("flushes"), state.get("created")
        counts = [created, *flushes.values()] if isinstance(flushes, Mapping) else [None]
        if not all(isinstance(count, int) and not isinstance(count, bool) and count >= 0 for count in counts):
            raise RecordError(
                f"the recorder's state is damaged: {dict(state)!r}; expected `flushes`, an integer >= 0 for each split, and "
                "`created`, an integer >= 0. Resume from another checkpoint."
            )
        self._growth.load_state_dict(state.get("growth"))  # checkpoints of older releases have none
        self._flushes, self._created = dict(flushes or {}), int(created or 0)

    @property
    def started(self) -> bool:
        """Whether recording has started; the main process then has the metrics file open."""
        return self._started

    def begin(self, resume_step: int | None) -> None:
        """Open the metrics file for a training; each training on this trainer gets its own file or segment.

        Args:
            resume_step: As in `start`.
        """
        if self._begun and self._stream is not None:
            self._stream.close()
            self._stream = self._aside = None
            self._evaluated = False
        self._begun = True
        self.start(resume_step)
        if self._evaluated:
            self._evaluated = False
            self.event(resume_step or 0, "info", "training", "a training begins after the evaluation above.")

    def start(self, resume_step: int | None = None) -> None:
        """Open the metrics file; it is opened this late because only now it is known whether the run resumes another.

        Args:
            resume_step: Last step of the checkpoint that is resumed; None starts a new file, and sets an earlier one aside.
        """
        self._started = True
        if not self._is_main_process:
            return
        if self._stream is None:
            self._aside = _set_aside(self.run_dir / METRICS_FILE) if resume_step is None else None
            self._stream = RunStream.open(self.run_dir, header=self._header(), resume_step=resume_step)
            for event in self._early_events:
                self.event(*event)
        elif resume_step is not None and self._aside is not None:
            self._continue_aside(self._aside, resume_step)

    def _continue_aside(self, aside: Path, resume_step: int) -> None:
        """Continue the run that was set aside for an evaluation, and add that evaluation to it."""
        assert self._stream is not None
        self._stream.close()
        evaluated, self._evaluated = read_run(self.run_dir), False
        aside.replace(self.run_dir / METRICS_FILE)
        self._aside = None
        self._stream = RunStream.open(self.run_dir, header=self._header(), resume_step=resume_step)
        for step in evaluated.steps:
            self._stream.step(resume_step, step.metrics, step.split)
        for profile in evaluated.profiles:
            self._stream.profile(resume_step, profile.profiles, profile.split)
        for scatter in evaluated.scatters:
            self._stream.scatter(resume_step, scatter.rollout_logprobs, scatter.old_logprobs, scatter.split)
        for event in evaluated.events:
            self._stream.event(resume_step, event.level, event.name, event.message, event.data)

    def observe(
        self, split: str, old_logprobs: Tensor, rollout_logprobs: Tensor, response_mask: Tensor, *, native: bool = False
    ) -> None:
        """Add a batch of `[B, T]` log-probabilities to a split.

        Args:
            split: "train" or "eval/<name>".
            old_logprobs: Log-probabilities by the trainer.
            rollout_logprobs: Log-probabilities by the engine.
            response_mask: True at tokens that count.
            native: Whether `old_logprobs` were computed without routing replay; these are accumulated separately.

        Raises:
            NonFiniteLogprobError: A log-probability in an unmasked position is not finite.
        """
        if (split, native) not in self._accumulators:
            self._accumulators[split, native] = self._new()
        self._accumulators[split, native].update(old_logprobs, rollout_logprobs, response_mask)

    def flush(self, split: str, step: int) -> dict[str, float]:
        """Return a split's metrics since the last flush, over all ranks, and write its profiles when they are due.

        Args:
            split: "train" or "eval/<name>".
            step: Finished optimizer steps.

        Returns:
            Metrics with the prefix "mismatch/", or "mismatch/native/" for those without routing replay; plus those of
            `StaleGap` if versions are followed, and those of `Growth` for the train split. Empty if nothing was observed.
        """
        summary, native = self._take(split, native=False), self._take(split, native=True)
        stale = self._take_stale() if split == "train" else {}
        if summary is None:
            return {}
        count = self._flushes.get(split, 0)
        self._flushes[split] = count + 1
        if split != "train" or count % self.monitor.profile_every == 0:
            self._write_profiles(split, step, summary)
        scalars = {PREFIX + name: value for name, value in summary.scalars.items()}
        if native is not None:
            scalars |= {f"{PREFIX}native/{name}": value for name, value in native.scalars.items()}
        return scalars | stale | (self._grown(step, scalars, stale) if split == "train" else {})

    def _grown(self, step: int, whole: Mapping[str, float], stale: Mapping[str, float]) -> dict[str, float]:
        """Return the growth of the gap; if versions are followed, the growth of its numerics part only."""
        prefix, found = (PREFIX, whole) if self._stale is None else (f"{PREFIX}numerics/", stale)
        k3 = found.get(f"{prefix}k3_kl")
        return {} if k3 is None else {prefix + name: value for name, value in self._growth.add(step, k3).items()}

    def _take(self, split: str, *, native: bool) -> MismatchSummary | None:
        """Return what all ranks observed since the last flush; None if there was nothing, or all of it was masked."""
        accumulator = self._accumulators.pop((split, native), None)
        if self._world_size > 1:
            assert self._gather is not None
            states = self._gather([None if accumulator is None else accumulator.state_dict()])
            accumulator = self._merged([state for state in states if state is not None])
        return None if accumulator is None or accumulator.is_empty else accumulator.compute()

    def follow_versions(self, least: int = ENOUGH) -> None:
        """From now on, separate drift from numerics in the train split; either all ranks must call this or none.

        Args:
            least: This many tokens of one version are enough for a figure.
        """
        self._stale = StaleGap(sampling=self.sampling, least=least)

    @property
    def stale(self) -> StaleGap | None:
        """Measures stale rollouts since the last flush; None if versions are not followed."""
        return self._stale

    def _take_stale(self) -> dict[str, float]:
        """Return what all ranks measured about stale rollouts since the last flush."""
        if self._stale is None:
            return {}
        mine, self._stale = self._stale, StaleGap(sampling=self.sampling, least=self._stale.least)
        if self._world_size > 1:
            assert self._gather is not None
            merged = StaleGap(sampling=self.sampling, least=mine.least)
            for state in self._gather([mine.state_dict()]):
                part = StaleGap(sampling=self.sampling, least=mine.least)
                part.load_state_dict(state)
                merged.merge(part)
            mine = merged
        return {PREFIX + name: value for name, value in mine.metrics().items()}

    def part(self) -> dict[str, int]:
        """Return the arguments with which `GapGroups` of other processes draw tokens for a scatter plot.

        Each process adds its number to the seed; `merge` takes the states afterwards.
        """
        self._created += 1
        return {"scatter_samples": self.monitor.scatter_samples, "seed": self._created << PROCESSES}

    def merge(self, split: str, state: dict[str, Any], *, native: bool = False) -> None:
        """Add what another process has measured on a batch.

        Args:
            split: "train" or "eval/<name>".
            state: State of its `MismatchAccumulator`.
            native: As in `observe`.

        Raises:
            RecordError: The state is of another version.
        """
        part = self._new()
        part.load_state_dict(state)
        if (split, native) in self._accumulators:
            self._accumulators[split, native].merge(part)
        else:
            self._accumulators[split, native] = part

    def step(self, split: str, step: int, metrics: dict[str, Any]) -> None:
        """Write what the trainer logged."""
        numbers = {k: v for k, v in metrics.items() if v is None or isinstance(v, (int, float))}
        if self._is_main_process and numbers:
            self.stream.step(step, numbers, split)

    def event(self, step: int, level: str, name: str, message: str, data: dict[str, Any] | None = None) -> None:
        """Write an event; before the start, keep it until the file is open."""
        if self._is_main_process and self._stream is None:
            self._early_events.append((step, level, name, message, data))
        elif self._is_main_process:
            self.stream.event(step, level, name, message, data)

    def end(self, step: int, status: str, message: str = "") -> None:
        """Write how training ended."""
        if self._is_main_process:
            self.stream.end(step, status, message)

    @contextlib.contextmanager
    def evaluation(self, step: int) -> Iterator[None]:
        """Write how an evaluation ended, unless it is part of another evaluation or of a training.

        Args:
            step: Number of optimizer steps that the evaluated weights have finished.
        """
        self.start()
        if self._begun or self._evaluating:
            yield
            return
        status, message = "completed", ""
        self._evaluating = self._evaluated = True
        try:
            yield
        except BaseException as error:
            status, message = "failed", f"{type(error).__name__}: {error}"
            raise
        finally:
            self._evaluating = False
            if self._is_main_process:
                # An error of a full disk must not hide the error that is already being raised.
                with contextlib.suppress(RunDirectoryError) if message else contextlib.nullcontext():
                    self.stream.end(step, status, message, of="evaluation")

    @property
    def stream(self) -> RunStream:
        """The open metrics file."""
        self.start()
        assert self._stream is not None
        return self._stream

    def _new(self) -> MismatchAccumulator:
        # Each rank and flush needs its own seed, because otherwise all of them would sample the same places.
        self._created += 1
        return MismatchAccumulator(
            sampling=self.sampling,
            scatter_samples=self.monitor.scatter_samples,
            seed=self._created * self._world_size + self._rank,
        )

    def _merged(self, states: list[dict[str, Any]]) -> MismatchAccumulator | None:
        if not states:
            return None
        merged = self._new()
        for state in states:
            part = self._new()
            part.load_state_dict(state)
            merged.merge(part)
        return merged

    def _write_profiles(self, split: str, step: int, summary: MismatchSummary) -> None:
        if not self._is_main_process:
            return
        profiles = {name: profile.to_dict() for name, profile in summary.profiles.items()}
        self.stream.profile(step, profiles, split)
        if summary.scatter is not None:
            scatter = summary.scatter
            self.stream.scatter(step, scatter["rollout_logprobs"], scatter["old_logprobs"], split)
