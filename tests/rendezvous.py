"""A port of its own for each program that a test starts."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

LOWEST, HIGHEST = 20_000, 30_000
"""Above Ray's workers, below what the system hands out to connections: such a port is gone again before a program binds it."""
_CHOICE = random.SystemRandom()


def free_port() -> int:
    """Return a port that nobody listens at, and that nobody is given who asks for any."""
    while True:
        port = _CHOICE.randrange(LOWEST, HIGHEST)
        with suppress(OSError), socket.socket() as listener:
            listener.bind(("127.0.0.1", port))
            return port


def rendezvous() -> dict[str, str]:
    """Return where the ranks of one program meet, even if it has one: a port that nothing else holds.

    TRL looks for a free port among four when it starts an engine, and vLLM binds it seconds later: two programs that start at
    the same time find the same.
    """
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
