"""How a failure of TRL's rollout worker, which is a process of its own, ends the training: at once, with the worker's error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mismatch_ext.adapters.trl.async_grpo.gate import Gate

from mismatch_ext import errors
from mismatch_ext.errors import MismatchError

PATIENCE = 15.0
"""Seconds that a worker has to end by itself, as in TRL."""


def naming(worker: Any) -> Callable[[float], None]:
    """Return TRL's health check of a rollout worker, changed so that an error of this package is raised as its own class.

    Args:
        worker: TRL's `AsyncRolloutWorker`.
    """
    plain = worker.check_health

    def check_health(stale_after_s: float) -> None:
        try:
            plain(stale_after_s)
        except RuntimeError as error:
            name, _, message = str(error.__cause__ or "").partition("\n")[0].partition(": ")
            kind = getattr(errors, name, None)
            if isinstance(kind, type) and issubclass(kind, MismatchError):
                raise kind(message) from error
            raise

    return check_health


def ending(worker: Any, gate: Gate) -> Callable[[], None]:
    """Return TRL's `stop` of a rollout worker, changed to ask no process to end that has failed or waits at the gate.

    TRL sets an event that a thread of the process waits for. `multiprocessing.Event.set` returns only when each waiting thread
    has woken. In a process that has ended no thread wakes, so that the training would not end.

    Args:
        worker: TRL's `AsyncRolloutWorker`.
        gate: The gate, which stays closed when a weight update has failed.
    """
    plain = worker.stop

    def stop() -> None:
        process = worker._process
        failed = worker._failed_event.is_set()
        if process is None or process._popen is None or (process.is_alive() and gate.is_open and not failed):
            plain()
            return
        process.join(PATIENCE if failed else 0)
        if process.is_alive():
            process.kill()
            process.join()
        worker._process = None

    return stop
