"""A run of verl that hangs, because a worker failed where nobody waits for it, ended with an error."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mismatch_ext.terminal import say

STARTING = 600.0
"""Seconds that servers have to start, whatever a phase of a step may take: they load weights and compile."""

GRACE = 30.0
"""Seconds that the trainer has to fail by itself once what it waits for is gone; then its process is ended."""


class Watchdog:
    """Watches a training from a thread of its own: a phase that takes too long is taken for a hang.

    verl's weight update waits for ever for a rollout worker that has failed, and so does its sampling.

    Args:
        timeout: Seconds that one phase may take where it names no longer time; 0 watches nothing.
        release: Ends what the trainer may be waiting for, so that its call fails.
        end: Ends this process where that did not help.
        grace: Seconds before it does.
    """

    def __init__(
        self,
        timeout: float,
        release: Callable[[], None],
        *,
        end: Callable[[int], None] = os._exit,
        grace: float = GRACE,
    ) -> None:
        self.timeout = timeout
        self.message: str | None = None
        self._release, self._end, self._grace = release, end, grace
        self._phase, self._since, self._limit = "start", time.monotonic(), timeout
        self._stop = threading.Event()

    def phase(self, name: str, at_least: float = 0.0) -> None:
        """Say what begins now; the time of the phase before is over.

        Args:
            name: What the trainer is doing, to follow "while it was".
            at_least: Seconds that it may take where the timeout is shorter.
        """
        self._phase, self._since, self._limit = name, time.monotonic(), max(self.timeout, at_least)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch for the duration of a block."""
        if not self.timeout:
            yield
            return
        thread = threading.Thread(target=self._watch, name="mismatch-watchdog", daemon=True)
        self._since = time.monotonic()
        thread.start()
        try:
            yield
        finally:
            self._stop.set()

    def _watch(self) -> None:
        while not self._stop.wait(min(1.0, self.timeout / 10)):
            waited = time.monotonic() - self._since
            if waited < self._limit:
                continue
            self.message = (
                f"verl made no progress for {waited:.0f} s while it was {self._phase} (mismatch.monitor.stall_timeout is "
                f"{self.timeout:g} s). Most often a worker or the rollout server has failed where nobody waits for its answer: "
                "look for the first error above and in Ray's worker logs. Raise stall_timeout if the phase is only slow."
            )
            say(f"mismatch-ext: {self.message}", error=True)
            try:
                self._release()
            finally:
                if not self._stop.wait(self._grace):
                    self._end(1)
            return
