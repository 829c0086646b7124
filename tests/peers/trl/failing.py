"""A process that fails while a thread of it waits for TRL to ask for its end, in a module that a spawned process imports fast."""

from __future__ import annotations

import threading
from typing import Any


def fail(stop: Any, failed: Any, waits: Any) -> None:
    """Fail as TRL's rollout worker does, once its watcher is asleep."""
    threading.Thread(target=stop.wait, daemon=True).start()
    waits.wait()
    failed.set()
