"""The checkpoints that lie in this repository, so that every machine measures the same weights.

A model trained anew comes out a little different on every kind of CPU, and so do all figures about it. These were trained once,
by the command in their `training.json`; `SHA256SUMS` is what `sha256sum --check` reads.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

FOLDER = Path(__file__).parent / "models"
SUMS = "SHA256SUMS"
POINTER = b"version https://git-lfs"


class DamagedModelError(RuntimeError):
    """A shipped checkpoint is not the one that was committed."""


def shipped_model(kind: str, recipe_key: str) -> Path | None:
    """Return the folder of a shipped checkpoint, its files checked.

    Args:
        kind: "dense" or "moe".
        recipe_key: Digest of the recipe that is asked for.

    Returns:
        The folder; None where none of this kind is shipped, or its recipe is another.

    Raises:
        DamagedModelError: A file is missing or is not what was committed.
    """
    folder = FOLDER / kind
    if not folder.is_dir():
        return None
    check(folder)
    record = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    return folder if record["recipe_key"] == recipe_key else None


def check(folder: Path) -> None:
    """Hold every file of a shipped checkpoint against its sum.

    Raises:
        DamagedModelError: A file is missing or is not what was committed; says what to do.
    """
    if not (folder / SUMS).is_file():
        raise DamagedModelError(
            f"{folder} has no {SUMS}. Restore it with `git checkout -- {folder}`, or train anew with --train."
        )
    for line in (folder / SUMS).read_text(encoding="utf-8").splitlines():
        expected, _, name = line.partition("  ")
        path = folder / name
        found = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "no such file"
        if found == expected:
            continue
        advice = f"Restore it with `git checkout -- {path}`, or train anew with --train."
        if path.is_file() and path.read_bytes()[: len(POINTER)] == POINTER:
            advice = f"It is a pointer of Git LFS, whose file was not fetched: run `git lfs pull`. {advice}"
        raise DamagedModelError(f"{path} is damaged: its SHA-256 is {found}, {SUMS} says {expected}. {advice}")


def ship(trained: Path, kind: str, command: str) -> Path:
    """Copy a trained checkpoint to where it is shipped from, with the command that made it and the sums.

    Args:
        trained: The checkpoint's folder.
        kind: "dense" or "moe".
        command: What made it.
    """
    folder = FOLDER / kind
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(trained, folder)
    record = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    (folder / "training.json").write_text(json.dumps({"command": command, **record}, indent=1) + "\n", encoding="utf-8")
    for path in folder.iterdir():
        path.chmod(0o644)
    files = sorted(path for path in folder.iterdir() if path.name != SUMS)
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")
    return folder
