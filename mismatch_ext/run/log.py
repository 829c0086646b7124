"""Everything that is written about a run: the gap, metrics, events, the alarms that metrics raise, and how the run ended."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from mismatch_ext.banner import Integration, banner, print_closing
from mismatch_ext.config import MismatchConfig
from mismatch_ext.host_names import HostNames
from mismatch_ext.monitor import ANEW, Monitor
from mismatch_ext.ranks import ONE_PROCESS, Ranks
from mismatch_ext.recorder import PREFIX, RunRecorder, ensure_writable
from mismatch_ext.records import SamplingSettings
from mismatch_ext.run.doctor import RunDoctor
from mismatch_ext.terminal import say
from mismatch_ext.verdicts import Verdicts

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Logged:
    """Result of a log.

    Args:
        metrics: Metrics that the host adds to its own, under the names that are logged.
        stop: Message of the alarm that stops training after this step; None to go on. It is the same on all ranks.
    """

    metrics: dict[str, float]
    stop: str | None


class RunLog:
    """Recorder, alarms and events of one trainer; every rank has one, and the main process writes.

        log = RunLog(block, run_dir, info=lambda: run_info(block, names, ...), step=lambda: steps, names=names)
        log.begin(None)
        for batch in rollouts:
            log.observe("train", old, rollout, mask)
            ...                                     # the step
            logged = log.log(steps, {"reward": reward})
            if logged.stop:
                break
        log.end("completed")

    Args:
        block: The `mismatch:` block.
        run_dir: Folder of the metrics.
        info: Builds the header of the metrics file, as `run_info` does; called when the first line is written.
        step: Returns the number of finished optimizer steps, for events.
        names: The host's names of its own metrics; None if it logs them under their roles' names.
        ranks: The processes that train together.
        verdicts: Decides whether a failed check ends the run; None ends it, whatever the block's level.
        tell: Shows a warning to the user; None logs it.

    Attributes:
        recorder: Writes the metrics file.
        monitor: Raises the alarms.
        stopped: Message of the alarm that stopped training; None while none has.
        doctor: Examines batches in the main process; None on other ranks, and if the block does not ask for it.

    Raises:
        RunDirectoryError: The folder cannot be written.
        ConfigError: An alarm's function cannot be imported.
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
        verdicts: Verdicts | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self.block, self.run_dir, self.ranks = block, run_dir, ranks
        self.verdicts = Verdicts("enforce", step) if verdicts is None else verdicts
        self._names, self._info, self._step = names, info, step
        self._tell = logger.warning if tell is None else tell
        self.monitor = Monitor(block.monitor, names)
        if ranks.rank == 0:
            ensure_writable(run_dir)
        self.recorder = RunRecorder(
            run_dir,
            monitor=block.monitor,
            sampling=SamplingSettings(),
            header=info,
            rank=ranks.rank,
            world_size=ranks.size,
            gather=lambda values: [value for found in ranks.gather(values) for value in found],
        )
        self.stopped: str | None = None
        self.doctor: RunDoctor | None = None
        if block.monitor.doctor is not None and ranks.rank == 0:
            self.doctor = RunDoctor(block.monitor, run_dir, self.event)
        self._looked = False
        if ranks.rank == 0:
            self.verdicts.report_to(self.recorder.event)

    def sampled_with(self, sampling: SamplingSettings) -> None:
        """Set the sampling settings of the tokens that are observed from now on."""
        self.recorder.sampling = sampling

    # The run.

    def begin(self, resume_step: int | None = None) -> None:
        """Open the metrics file for a training.

        Args:
            resume_step: Last step of the checkpoint that is resumed; None begins a new training.
        """
        self.recorder.begin(resume_step)

    def announce(self, integration: Integration, *, measured: str) -> None:
        """Print which parts of the block are active, in which peer, and by which call.

        Args:
            integration: The call through which each part of the block reaches the host.
            measured: When the gap is measured, "at every ...".
        """
        if self.ranks.rank == 0:
            watched, info = self.monitor, self._info()
            say(banner(self.block, info, watched, self.run_dir, integration=integration, measured=measured))

    def end(self, status: str, message: str = "", *, step: int | None = None) -> None:
        """Write what was measured since the last log, and how training ended; then print a summary.

        Args:
            status: "completed" or "failed".
            message: Reason; "" takes the message of the alarm that stopped training, if one did.
            step: Number of finished optimizer steps; None takes the number that the `step` of this log returns.
        """
        if not self.recorder.started:
            return
        at = self._step() if step is None else step
        # With several ranks merging is a collective operation, and after a failure the other ranks may not take part.
        if self.ranks.size == 1 and (left := self.recorder.flush("train", at)):
            self.recorder.step("train", at, left)
        self.recorder.end(at, status, message or self.stopped or "")
        if self.ranks.rank == 0:
            print_closing(self.run_dir)

    # A step.

    def observe(self, split: str, old: Tensor, rollout: Tensor, mask: Tensor, *, native: bool = False) -> None:
        """Add a batch of `[B, T]` log-probabilities to a split, as `RunRecorder.observe` does."""
        self.recorder.observe(split, old, rollout, mask, native=native)

    def merge(self, split: str, state: dict[str, Any], *, native: bool = False) -> None:
        """Add another process's measurement of a batch to a split, as `RunRecorder.merge` does."""
        self.recorder.merge(split, state, native=native)

    def event(
        self, level: str, name: str, message: str, data: dict[str, Any] | None = None, *, step: int | None = None
    ) -> None:
        """Write an event of the current step, or of `step`."""
        self.recorder.event(self._step() if step is None else step, level, name, message, data)

    def log(self, step: int, metrics: Mapping[str, Any], split: str = "train") -> Logged:
        """Write the host's metrics with those measured since the last log, and raise alarms for "train"; all ranks must call it.

        Args:
            step: Number of finished optimizer steps.
            metrics: The host's metrics.
            split: "train" or "eval/<name>".
        """
        found = self.measured(step, split)
        whole = {**metrics, **found}
        self.write(step, whole, split)
        return Logged(metrics=found, stop=self.watch(step, whole) if split == "train" else None)

    def measured(self, step: int, split: str = "train") -> dict[str, float]:
        """Return the metrics of all ranks' tokens observed since the last call; for "train", those of the findings so far too."""
        found = self.recorder.flush(split, step)
        if split == "train":
            found |= {PREFIX + name: value for name, value in self.verdicts.metrics().items()}
        return found

    def write(self, step: int, metrics: Mapping[str, Any], split: str = "train") -> None:
        """Write those of the metrics that are numbers."""
        self.recorder.step(split, step, {name: _plain(value) for name, value in metrics.items()})

    def watch(self, step: int, metrics: Mapping[str, Any]) -> str | None:
        """Raise the alarms of a training log, and return the message of an alarm that stops training; all ranks must call it."""
        return self.decided(self.look(step, metrics))

    def look(self, step: int, metrics: Mapping[str, Any]) -> str | None:
        """Raise the alarms of a training log in the main process; return the message of one that stops training."""
        stop = None
        if self.ranks.rank == 0:
            with self.verdicts.checking("alarms"):
                stop = self._watch(step, metrics)
        return stop

    def decided(self, stop: str | None) -> str | None:
        """Return on every rank what `look` returned in the main process; all ranks must call it."""
        if self.verdicts.observes:
            return None
        if self.ranks.size > 1 and any(rule.action == "stop" for rule in self.monitor.rules.values()):
            # A metric may differ between ranks, and if one rank stopped by itself the others would wait for it.
            stop = self.ranks.gather(stop)[0]
        self.stopped = self.stopped if stop is None else stop
        return stop

    def _watch(self, step: int, metrics: Mapping[str, Any]) -> str | None:
        if not self._looked:
            # Done at the first log, so that the user need not wait for the end of training.
            self._looked = True
            for metric, message in self.monitor.unwatched(metrics).items():
                self.event("warning", "unwatched", message, {"metric": metric}, step=step)
                self._tell(message)
        stop = None
        for alarm in self.monitor.observe(step, metrics):
            self.event(alarm.level, "alarm", alarm.message, alarm.to_dict(), step=step)
            if alarm.status == "raised":
                self._tell(alarm.message)
                if self.doctor is not None:
                    self.doctor.raised(alarm)
            if alarm.stops and self.verdicts.observes:
                self.verdicts.found("alarm", alarm.message, step=step)
            elif alarm.stops:
                stop = alarm.message
        return stop

    # What a checkpoint holds.

    def begin_anew(self) -> None:
        """Forget the alarms of an earlier training of this trainer; those of a checkpoint are loaded afterwards."""
        self.monitor = Monitor(self.block.monitor, self._names)
        self.stopped, self._looked = None, False

    def state_dict(self) -> dict[str, Any]:
        """Return the states of alarms and recorder as JSON-able data, under the keys of a checkpoint."""
        return {"monitor": self.monitor.state_dict(), "recorder": self.recorder.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any], *, step: int) -> None:
        """Continue from a checkpoint, and say which alarms begin anew.

        Args:
            state: The state that `state_dict` returned; it may have further keys, and a part that is missing begins anew.
            step: Step of the checkpoint.

        Raises:
            RecordError: The state is damaged.
        """
        self.begin_anew()
        if state.get("recorder") is not None:
            self.recorder.load_state_dict(state["recorder"])
        for message, metrics in self.monitor.resume(state.get("monitor")):
            self.event("info", ANEW, message, {"metrics": metrics}, step=step)
            self._tell(message)


def _plain(value: Any) -> Any:
    """Return the number in a tensor without dimensions or a numpy scalar; return any other value as it is."""
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value
