"""What the doctor and the gate say while they work."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import TYPE_CHECKING

from mismatch_ext.terminal import say

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar

# Seconds between two lines of progress in a log.
LINES_APART = 5.0
CAUSES = "causes"
# How long each rung takes in proportion to the others; all causes are one. A model of another size has other proportions.
# In seconds of a processor with SmolLM2 (evidence/doctor_real.json).
QUICK = {
    "engine": 28,
    "first look": 3,
    "engine again": 8,
    "engine's own noise": 14,
    "trainer": 30,
    CAUSES: 25,
    "remedy": 6,
    "blocks": 8,
}
# By its passes: twice as many responses and more, and about 70 passes of changed models.
WHOLE = QUICK | {"engine": 60, "engine again": 30, "engine's own noise": 40, "trainer": 200, CAUSES: 900}
GATE = {"engine": 15, "batches": 40, "engine's blocks": 5, "oracle": 40, "trainer's blocks": 10}
# About how many causes are tried, for the part of the time that one of them takes.
MANY_CAUSES = 24


def of_log(times: Mapping[str, float]) -> dict[str, float]:
    """Return how long the rungs take where a log is examined and no engine."""
    return {
        "weight versions": 4,
        "trainer": times["trainer"],
        CAUSES: times[CAUSES],
        "run's own pass": 10,
        "log's trainer": 4,
    }


class Progress:
    """Says what a command computes, and keeps the seconds of each rung.

    A terminal shows a bar with the time to go; a log gets a line when a rung begins, at most one in `LINES_APART` seconds.
    """

    def __init__(self, command: str, times: Mapping[str, float], *, console: Console | None = None) -> None:
        self._command, self._times = command, times
        self._bar = _bar(console)
        self._task = self._bar.add_task("", total=sum(times.values()), left="") if self._bar is not None else None
        self._name, self._began, self._done = "", perf_counter(), 0.0
        self._since, self._told = self._began, self._began - LINES_APART
        self.seconds: dict[str, float] = {}

    def __call__(self, name: str, words: str = "") -> None:
        """Begin a rung; `words` say what it does if the name does not."""
        now = perf_counter()
        if self._name:
            self.seconds[self._name] = self.seconds.get(self._name, 0.0) + now - self._since
            self._done = self._done_by(self._name)
        self._name, self._since = name, now
        if name:
            self._tell(words or name, now)

    def say(self, line: str) -> None:
        """Print a line that stays."""
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False)
        else:
            say(line, error=True)

    def ended(self) -> dict[str, float]:
        """End the last rung, and return the seconds that each took."""
        self("")
        return {name: round(seconds, 3) for name, seconds in self.seconds.items()}

    def _done_by(self, name: str) -> float:
        """Return how much of the time is over once a rung has ended; a rung that is not listed is one of the causes."""
        listed = name if name in self._times else CAUSES
        names = list(self._times)
        before = sum(self._times[earlier] for earlier in names[: names.index(listed)])
        whole = before + self._times[listed]
        if listed == name:
            return max(self._done, whole)
        one_more = max(self._done, before) + self._times[CAUSES] / MANY_CAUSES
        return max(self._done, min(whole, one_more))

    def _tell(self, words: str, now: float) -> None:
        passed = now - self._began
        if self._bar is not None and self._task is not None:
            total = sum(self._times.values())
            left = f"about {passed * (total - self._done) / self._done:.0f} s to go" if self._done else ""
            self._bar.update(self._task, description=f"{self._command}: {words}", completed=self._done, left=left)
        elif now - self._told >= LINES_APART:
            self._told = now
            say(f"{self._command}, after {passed:.0f} s: {words}", error=True)

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def _bar(console: Console | None) -> Bar | None:
    """Return a bar for standard error; None if that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    console = console or Console(stderr=True)
    if not console.is_terminal:
        return None
    words = TextColumn("{task.description}", markup=False)
    left = TextColumn("{task.fields[left]}", markup=False)
    return Bar(words, BarColumn(), TimeElapsedColumn(), left, console=console, transient=True)
