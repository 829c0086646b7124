"""Ends a run with an error if it hangs, for example because a worker failed and nobody waits for its answer."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mismatch_ext.errors import StallError
from mismatch_ext.terminal import say

STARTING = 600.0
"""Seconds that servers have to start, however short the limit for a phase of a step: they load weights and compile."""

ALIVE = 15.0
"""Seconds since its last poll for which a trainer that waits in a loop of its own counts as alive."""

GRACE = 30.0
"""Seconds that the trainer has to fail by itself after the watchdog has ended what it waits for; then its process is ended."""


class Watchdog:
    """Watches a training from its own thread, and treats a phase that takes too long as a hang.

    A host may wait for ever for a rollout worker that has failed: verl does so in its weight update and in its sampling. If the
    trainer waits by polling, its next poll raises the error while its workers still live, so that it can save what it has
    trained. If it does not poll, the watchdog ends what it waits for, so that its call fails.

    Args:
        timeout: Seconds that one phase may take, unless the phase names a longer time; 0 watches nothing.
        release: Ends what the trainer may be waiting for, so that its call fails.
        host: Name, for the message, of the program that makes no progress.
        logs: Where else to find the errors of the host's workers, for the message.
        end: Ends this process if `release` did not help.
        grace: Seconds between `release` and `end`.
    """

    def __init__(
        self,
        timeout: float,
        release: Callable[[], None],
        *,
        host: str,
        logs: str,
        end: Callable[[int], None] = os._exit,
        grace: float = GRACE,
    ) -> None:
        self.timeout = timeout
        self.message: str | None = None
        self._release, self._end, self._grace = release, end, grace
        self._host, self._logs = host, logs
        self._phase, self._since, self._limit = "start", time.monotonic(), timeout
        self._stop = threading.Event()
        self._polled, self._raise, self._raised = -math.inf, False, False

    def phase(self, name: str, at_least: float = 0.0) -> None:
        """Begin a new phase, and end the one before.

        Args:
            name: What the trainer is doing, as words that can follow "while it was".
            at_least: Seconds that this phase may take even if the timeout is shorter.
        """
        self._phase, self._since, self._limit = name, time.monotonic(), max(self.timeout, at_least)

    def polled(self) -> None:
        """Say that the trainer polls for what it waits for.

        Raises:
            StallError: The phase has taken too long.
        """
        self._polled = time.monotonic()
        if self._raise:
            self._raise = False
            raise StallError(self.message)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch while the `with` block runs."""
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
            message = (
                f"{self._host} made no progress for {waited:.0f} s while it was {self._phase} (mismatch.monitor.stall_timeout is "
                f"{self.timeout:g} s). Most often a worker or the rollout server has failed where nobody waits for its answer: "
                f"look for the first error above and in {self._logs}. Raise stall_timeout if the phase is only slow."
            )
            say(f"mismatch-ext: {message}", error=True)
            self.message = self.message or message
            if not self._raised and time.monotonic() - self._polled < min(ALIVE, self._limit):
                # The trainer may take as long as a phase to handle the error.
                self._since, self._raise, self._raised = time.monotonic(), True, True
                continue
            try:
                self._release()
            finally:
                if not self._stop.wait(self._grace):
                    self._end(1)
            return
