"""What a host has said when it resumed, in a form that is the same for all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mismatch_ext.log_reading import read_run

Told = dict[str, Any]


def told(run_dir: Path | None, error: str, file: Path) -> Told:
    """Return the error without the file's place, and the events as lists.

    Args:
        run_dir: The run's folder; None where none is written.
        error: What was raised; empty if nothing.
        file: The state file.
    """
    events = [] if run_dir is None else read_run(run_dir).events
    return {
        "error": error.replace(str(file), "FILE"),
        "events": [
            [event.step, event.level, event.name, event.message, event.data]
            for event in events
            if event.name != "resumed"
        ],
    }
