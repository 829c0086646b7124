"""Names of weight updates, by which a server tells whose weights it holds."""

from __future__ import annotations

import os
import socket
import uuid
from typing import TYPE_CHECKING

from mismatch_ext.errors import EngineError

if TYPE_CHECKING:
    from mismatch_ext.adapters.vllm.remote import RemoteEngine

FRESH = "default"
"""What vLLM calls the weights that a server was started with."""
PREFIX = "mismatch/"
UNFINISHED = "/unfinished"


class Stamps:
    """The names that one trainer gives to its updates.

    Attributes:
        owner: The beginning of all of its names.
        count: Number of updates that were begun; the name of a finished update ends with it.
        last: The name of its last finished update; None before the first.
    """

    def __init__(self) -> None:
        self.owner = f"{PREFIX}{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}/"
        self.count = 0
        self.last: str | None = None

    def begin(self) -> str:
        """Return the name of the next update while it runs; a server keeps this name if the update fails half-way."""
        self.count += 1
        return f"{self.owner}{self.count}{UNFINISHED}"

    def end(self) -> str:
        """Return the final name of the update that was begun and has now finished."""
        self.last = f"{self.owner}{self.count}"
        return self.last

    def contradiction(self, name: str) -> str | None:
        """Say why a server does not hold this trainer's last update, or return None if it does.

        Args:
            name: What the server calls its weights.
        """
        if name == self.last:
            return None
        both_names = f"it calls its weights {name!r}, and this trainer's last update was {self.last!r}"
        if name.endswith(UNFINISHED):
            return f"a weight update of it failed half-way ({both_names}); restart it."
        if name == FRESH:
            return (
                f"it was restarted, and holds the weights that it was started with ({both_names}); resume from the last "
                "checkpoint."
            )
        if name.startswith(self.owner):
            return f"it holds an older update of this trainer ({both_names}); restart it, and resume from the last checkpoint."
        if name.startswith(PREFIX):
            owner = name.removeprefix(PREFIX).rpartition("/")[0]
            return f"another trainer, {owner}, has sent weights to it ({both_names}); give each trainer a server of its own."
        return f"somebody else has named or sent its weights ({both_names}); give each trainer a server of its own."

    def expect_on(self, remote: RemoteEngine, timeout: float | None = None) -> None:
        """Refuse to go on if a server does not hold this trainer's last update.

        Args:
            remote: The server.
            timeout: Seconds that it may be silent; None for the client's.

        Raises:
            EngineError: It was restarted, somebody else has updated it, or an update failed; says which.
        """
        if self.last is None:
            return
        why = self.contradiction(remote.name_of_weights(timeout))
        if why is not None:
            raise EngineError(f"the vLLM server at {remote.http.url} does not hold this trainer's weights: {why}")


def is_fresh(remote: RemoteEngine) -> bool:
    """Tell whether a server holds the weights that it was started with.

    Raises:
        EngineError: An update of it failed half-way.
    """
    name = remote.weight_version
    if name.endswith(UNFINISHED):
        raise EngineError(
            f"a weight update of the vLLM server at {remote.http.url} failed half-way, or is under way ({name}): it holds "
            "parts of two models. Restart it, or give each trainer a server of its own."
        )
    return name == FRESH
