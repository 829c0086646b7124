"""Writes a file at a path that a user named, whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from mismatch_ext.errors import RunDirectoryError


def write_whole(path: Path, data: bytes, *, make_folder: bool = False) -> None:
    """Write a file; after an interruption or on a full disk it still holds the old bytes or the new ones.

    A link stays, and a device or a pipe is never replaced. `make_folder` is right if the user named the folder and not the file.
    """
    try:
        if make_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            path.write_bytes(data)
        else:
            _replace(path.resolve(), data)
    except (OSError, ValueError) as error:
        raise RunDirectoryError(
            f"{path} cannot be written: {getattr(error, 'strerror', None) or error}; free space, or name another file."
        ) from error


def _replace(target: Path, data: bytes) -> None:
    """Write the bytes next to the target and rename them."""
    partial = target.with_name(f"{target.name}.partial")
    partial.unlink(missing_ok=True)  # of a process that was killed
    # If another process makes its file between these two lines, this fails, and the file stays: it is not ours.
    file = partial.open("xb")
    try:
        with file:
            file.write(data)
        os.replace(partial, target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
