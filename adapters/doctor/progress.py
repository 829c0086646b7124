"""What the doctor and the gate say while they work."""

from __future__ import annotations

from time import perf_counter

from mismatch_ext.terminal import say

# Seconds between two lines of progress in a log.
LINES_APART = 5.0


class Progress:
    """Says what a command computes, and keeps the seconds of each rung.

    A terminal shows the rung that runs; a log gets a line when a rung begins, at most one in `LINES_APART` seconds.
    """

    def __init__(self, command: str) -> None:
        from rich.console import Console

        console = Console(stderr=True)
        self._command, self._status = command, console.status("") if console.is_terminal else None
        self._name, self._began = "", perf_counter()
        self._since, self._told = self._began, self._began - LINES_APART
        self.seconds: dict[str, float] = {}

    def __call__(self, name: str) -> None:
        """Begin a rung."""
        now = perf_counter()
        if self._name:
            self.seconds[self._name] = self.seconds.get(self._name, 0.0) + now - self._since
        self._name, self._since = name, now
        if name:
            self._tell(f"{self._command}, after {now - self._began:.0f} s: {name}", now)

    def say(self, line: str) -> None:
        """Print a line that stays."""
        if self._status is not None:
            self._status.console.print(line, markup=False, highlight=False)
        else:
            say(line, error=True)

    def _tell(self, line: str, now: float) -> None:
        if self._status is not None:
            self._status.update(line)
        elif now - self._told >= LINES_APART:
            self._told = now
            say(line, error=True)

    def ended(self) -> dict[str, float]:
        """End the last rung, and return the seconds that each took."""
        self("")
        return {name: round(seconds, 3) for name, seconds in self.seconds.items()}

    def __enter__(self) -> Progress:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()
