"""Lets a run in its own process keep everything that it prints in its folder."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path


def be_quiet(out: Path) -> None:
    """Give this process its own port, and write everything that it and its libraries print from now on to `out/log.txt`."""
    with socket.socket() as free:  # on a CPU, accelerate takes a fixed port, which another run may hold
        free.bind(("localhost", 0))
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", str(free.getsockname()[1])
    log = os.open(out / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(log, stream.fileno())
    os.close(log)
