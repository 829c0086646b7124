"""`monitor.doctor`: decides which batches of a run are examined for why its two sides differ, and writes what is found."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mismatch_ext.alarms import Alarm
from mismatch_ext.config import MonitorConfig
from mismatch_ext.doctor import Diagnosis, report
from mismatch_ext.doctor.diagnose import DOCTOR_FILE
from mismatch_ext.files import write_whole
from mismatch_ext.terminal import say

logger = logging.getLogger(__name__)

EXAMINED_TOKENS = 4096
"""Response tokens of a batch that are examined at most, in whole responses, two in any case; below 2,000 there are no shares."""
EVERY = 50
"""Steps between two batches that are examined by `on_alarm`; a choice."""
FIRST_BATCH = "the first batch"
EVENT = "doctor"
"""Name of the events that say what was found, or why a batch could not be examined."""
METRICS = "doctor/"
Look = Callable[[], Diagnosis]


class RunDoctor:
    """Decides which batches of a run are examined, and writes what is found; only the main process has one.

    A run goes on even if an examination fails. The adapters refuse before the first step a run that cannot be examined at all.
    """

    def __init__(self, monitor: MonitorConfig, run_dir: Path, event: Callable[..., None]) -> None:
        self._monitor, self._run_dir, self._event = monitor, run_dir, event
        self._why = FIRST_BATCH if monitor.doctor == "first_batch" else None
        self._examined: set[str] = set()
        self._last: int | None = None

    @property
    def due(self) -> bool:
        """Whether the next batch is to be examined."""
        return self._why is not None

    def raised(self, alarm: Alarm) -> None:
        """Take note of an alarm; the first alarm on a metric asks for an examination, unless there was one a few steps ago."""
        if self._monitor.doctor != "on_alarm" or alarm.metric in self._examined:
            return
        if self.due or (self._last is not None and alarm.step - self._last < EVERY):
            return  # this alarm does not count as the metric's first: its next one may ask again
        self._why = alarm.metric

    def examine(self, step: int, look: Look) -> dict[str, float]:
        """Examine a batch by `look`, print the table, write `doctor.json` and an event; return metrics, {} after an error."""
        assert self._why is not None
        why, self._why, self._last = self._why, None, step
        folder = self._run_dir / f"doctor_step_{step}"
        try:
            diagnosis = look()
            data = {"run": {"step": step, "because": why}, **diagnosis.data()}
            write_whole(folder / DOCTOR_FILE, (json.dumps(data, indent=1) + "\n").encode(), make_folder=True)
            table, event = report(diagnosis), _event_of(diagnosis, step, why)
        except Exception as error:  # training goes on, whatever it is: memory, a disk, a model that is new
            message = f"the batch of step {step} could not be examined ({why}): {type(error).__name__}: {error}"
            logger.warning(message, exc_info=error)
            self._event("warning", EVENT, message, {"because": why})
            return {}
        self._examined.add(why)  # of a metric whose batch could not be examined, a later alarm asks again
        say(f"mismatch-ext: batch of step {step} examined ({why})\n{table}\n{folder / DOCTOR_FILE}")
        self._event(*event)
        return {
            METRICS + "unexplained": diagnosis.unexplained,
            METRICS + "engine_ratio": diagnosis.ratio,
            METRICS + "trainer_ratio": diagnosis.trainer_ratio,
        }


def rows_within(tokens: Sequence[int], most: int) -> list[int]:
    """Draw rows of a batch at random, at least two, until their tokens reach a limit; return them in ascending order."""
    drawn = [int(row) for row in np.random.default_rng(0).permutation(len(tokens)) if tokens[row]]
    total = np.cumsum([tokens[row] for row in drawn])
    count = max(2, int(np.searchsorted(total, most, side="right")))
    return sorted(drawn[:count])


def _event_of(diagnosis: Diagnosis, step: int, why: str) -> tuple[str, str, str, dict[str, Any]]:
    """Return level, name, message and data of the event of an examination."""
    causes = "; ".join(cause.said for cause in diagnosis.causes) or "no cause is named"
    message = f"batch of step {step}, {diagnosis.tokens} tokens, examined ({why}): {diagnosis.verdict}: {causes}."
    level = "info" if diagnosis.verdict == "clean" else "warning"
    data = {"because": why, "verdict": diagnosis.verdict, "causes": [cause.key for cause in diagnosis.causes]}
    return level, EVENT, message, data
