"""A port of its own for each program that a test starts."""

from __future__ import annotations

import socket


def rendezvous() -> dict[str, str]:
    """Return where the ranks of one program meet, even if it has one: a port that nothing else holds.

    TRL looks for a free port among four when it starts an engine, and vLLM binds it seconds later: two programs that start at
    the same time find the same.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1])}
