"""A stock server of an engine on this machine, in processes of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import requests


@contextmanager
def answering(
    command: Sequence[str], port: int, environment: Mapping[str, str], log: Path, *, patience: float = 20
) -> Iterator[str]:
    """Run a server until the end of the block.

    Args:
        command: Starts it.
        port: Where it listens.
        environment: Its variables, all of them.
        log: For what it says.
        patience: Seconds that it has to end when it is asked to.

    Yields:
        Its address, once it is healthy.
    """
    with log.open("w", encoding="utf-8") as written:
        server = subprocess.Popen(command, env=environment, stdout=written, stderr=written, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(url, server, log)
        yield url
    finally:
        # A group of its own: the server and the processes that it started.
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            server.wait(patience)
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)


def _wait(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + 360
    while time.monotonic() < until:
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with {server.returncode}: {log.read_text()[-3000:]}")
        with suppress(requests.RequestException):
            if requests.get(f"{url}/health", timeout=5).ok:
                return
        time.sleep(0.5)
    raise RuntimeError(f"the server did not start: {log.read_text()[-3000:]}")
