"""A gate that holds requests back while a server's weights change, so that each request is of one version."""

from __future__ import annotations

from dataclasses import dataclass
from multiprocessing.context import get_spawning_popen
from typing import Any

_OPEN, _STEP, _UPDATE, _REQUESTS = range(4)


@dataclass(frozen=True, kw_only=True)
class Held:
    """The weights that answer a request which the gate lets through.

    Args:
        step: Finished optimizer steps when they were sent: the version of the tokens that they sample.
        update: Number of the weight update that sent them.
    """

    step: int
    update: int


class Gate:
    """A gate that the trainer shares with the process of its rollout worker.

    A request enters before it is sent and leaves when it is answered. The trainer closes the gate, waits until no request is
    inside, and opens it when the new weights are there. So no request sees two versions, whatever the server does meanwhile.

    Args:
        context: The multiprocessing context that spawns the worker.
    """

    def __init__(self, context: Any) -> None:
        self._state = context.Array("q", 4)

    def __getstate__(self) -> dict[str, Any]:
        # TRL pickles a worker's arguments once to see whether it can; shared memory can be pickled only to spawn a process.
        return {} if get_spawning_popen() is None else self.__dict__.copy()

    def begin(self) -> None:
        """Forget the requests of a worker that has ended, and let none through until weights are there."""
        with self._state.get_lock():
            self._state[_OPEN] = self._state[_REQUESTS] = 0

    def close(self) -> None:
        """Let no further request through."""
        with self._state.get_lock():
            self._state[_OPEN] = 0

    def open(self, held: Held) -> None:
        """Let requests through to new weights."""
        with self._state.get_lock():
            self._state[_STEP], self._state[_UPDATE], self._state[_OPEN] = held.step, held.update, 1

    @property
    def is_open(self) -> bool:
        """Whether it lets requests through."""
        with self._state.get_lock():
            return bool(self._state[_OPEN])

    @property
    def requests(self) -> int:
        """How many requests are inside."""
        with self._state.get_lock():
            return int(self._state[_REQUESTS])

    def enter(self) -> Held | None:
        """Let a request through, and return the weights that it will find; None while the gate is closed."""
        with self._state.get_lock():
            if not self._state[_OPEN]:
                return None
            self._state[_REQUESTS] += 1
            return Held(step=int(self._state[_STEP]), update=int(self._state[_UPDATE]))

    def leave(self) -> None:
        """Note that a request which was let through has been answered, or has failed."""
        with self._state.get_lock():
            self._state[_REQUESTS] -= 1
