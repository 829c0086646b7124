"""What a loop's checkpoint holds beside the trainer's own state, and what is read back of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mismatch_ext.checkpoint import STATE_FILE, read_state
from mismatch_ext.errors import RecordError


def saved_state(folder: Path) -> dict[str, Any]:
    """Return the state in a folder that `run.save` wrote to.

    Raises:
        RecordError: It holds none, or a damaged one.
    """
    path = folder / STATE_FILE
    state = read_state(path)
    if state is None or not isinstance((state.get("run") or {}).get("step"), int):
        raise RecordError(f"{path} holds no state of a run; resume from a folder that run.save wrote to.")
    return state
