"""What this package keeps beside verl's own files in an actor's checkpoint: loss scale, rate, choice of measured passes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl.utils.fs import copy_to_local

from mismatch_ext import checkpoint
from mismatch_ext.checkpoint import STATE_FILE
from mismatch_ext.ranks import WORLD, gathered, together


def write_state(folder: str, state: Mapping[str, Any]) -> None:
    """Write the state into a checkpoint's folder, in one go; rank 0 writes, and all ranks must call this.

    Args:
        folder: The folder that verl saves an actor in; made where it is missing.
        state: JSON-able data.

    Raises:
        RunDirectoryError: The folder or the file cannot be written.
    """
    with together(WORLD):
        if WORLD.rank == 0:
            checkpoint.write_state(Path(folder) / STATE_FILE, state)


def read_state(folder: str) -> dict[str, Any] | None:
    """Return what rank 0 finds in a checkpoint, on all ranks, which must all call this; None where there is nothing of ours.

    Raises:
        RecordError: The file is damaged, or of another version of this package.
    """
    state = None
    with together(WORLD):
        if WORLD.rank == 0:
            state = _read(folder)
    return gathered(state)[0]  # type: ignore[no-any-return]


def _read(folder: str) -> dict[str, Any] | None:
    there = str(Path(folder) / STATE_FILE) if "://" not in folder else f"{folder}/{STATE_FILE}"
    return checkpoint.read_state(Path(copy_to_local(there)))
