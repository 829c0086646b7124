"""Ends the present process by SIGKILL at a moment that a test has chosen, such as the middle of a write."""

from __future__ import annotations

import io
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch


class Death:
    """A moment to die.

    Args:
        count: How often the moment has to come; seconds for `time`.
        part: Which part of a write is done by then.
        armed: Whether it may be yet.
    """

    def __init__(self, count: float, part: float = 0.5, armed: Callable[[], bool] = lambda: True) -> None:
        self.count, self.part, self._armed = count, part, armed
        self._seen = 0

    def due(self) -> bool:
        """Count, and tell whether this is the time."""
        self._seen += self._armed()
        return self._armed() and self._seen >= self.count

    def die(self, *_: Any, **__: Any) -> NoReturn:
        """End this process, with nothing of Python's own done before."""
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")

    def torn(self, path: Any, content: bytes) -> NoReturn:
        """Write a part of a file and die."""
        Path(path).write_bytes(content[: int(self.part * len(content))])
        self.die()

    def plant(self, where: str) -> bool:
        """Let this process die at a moment that any host has; return whether it is one of them."""
        moments = {
            "mismatch.json": self._in_state,
            "metrics": self._in_metrics,
            "torch.save": self._in_tensors,
            "time": self._in_time,
        }
        if where in moments:
            moments[where]()
        return where in moments

    def _in_time(self) -> None:
        def wait() -> None:
            while not self._armed():
                time.sleep(0.005)
            time.sleep(self.count)
            self.die()

        threading.Thread(target=wait, daemon=True).start()

    def _in_state(self) -> None:
        replace = os.replace

        def replace_torn(source: Any, target: Any) -> None:
            if Path(target).name == "mismatch.json" and self.due():
                self.torn(source, Path(source).read_bytes())
            replace(source, target)

        os.replace = replace_torn  # type: ignore[assignment]

    def _in_metrics(self) -> None:
        plain = os.write

        def write_line(descriptor: int, line: bytes) -> int:
            if line.startswith(b'{"kind"') and self.due():
                plain(descriptor, line[: int(self.part * len(line))])
                self.die()
            return plain(descriptor, line)

        os.write = write_line  # type: ignore[assignment]

    def _in_tensors(self) -> None:
        save = torch.save

        def save_torn(value: Any, file: Any, *args: Any, **kwargs: Any) -> None:
            if isinstance(file, (str, Path)) and self.due():
                save(value, whole := io.BytesIO(), *args, **kwargs)
                self.torn(file, whole.getvalue())
            save(value, file, *args, **kwargs)

        torch.save = save_torn


def plain(value: Any) -> Any:
    """Return nested data with tensors as their bytes, which compare bit for bit."""
    if isinstance(value, torch.Tensor):
        local = getattr(value, "to_local", lambda: value)()
        return local.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        return [(key, plain(inner)) for key, inner in sorted(value.items(), key=str)]
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    return value
