"""Scenarios without peers, for the tests of what runs scenarios."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

IMPORTED_BY = os.getpid()


def told(**given: object) -> dict[str, object]:
    """Return what was given, and who imported this module."""
    os.write(1, b"written by C\n")
    print("printed", file=sys.stderr)
    return {**given, "pid": os.getpid(), "imported_by": IMPORTED_BY, "variable": os.environ.get("PLAIN_SCENARIO")}


def fails() -> None:
    """Raise."""
    raise ValueError("as it should")


def dies() -> None:
    """Be killed."""
    os.kill(os.getpid(), signal.SIGKILL)


def leaves_a_child(file: str) -> int:
    """Return while a child runs on, which would write a file."""
    return subprocess.Popen(["sh", "-c", f"sleep 3; touch {file}"]).pid


def hangs(file: str) -> None:
    """Run on, with a child that would write a file."""
    leaves_a_child(file)
    time.sleep(60)
