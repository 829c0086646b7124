"""The small models that lie in this repository, so that every machine measures the same weights.

A model trained anew comes out a little different on every kind of CPU, and so do all figures about it. These were trained once,
by the command in their `training.json`.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

FOLDER = Path(__file__).parent / "models"
SUMS = "SHA256SUMS"  # as `sha256sum --check` reads it


class DamagedModelError(RuntimeError):
    """A shipped checkpoint is not the one that was committed."""


def shipped_model(kind: str) -> Path:
    """Return the folder of a shipped checkpoint, which AutoModelForCausalLM, AutoTokenizer and vLLM load.

    Args:
        kind: "dense" or "moe".

    Raises:
        DamagedModelError: A file is missing or is not what was committed.
    """
    folder = FOLDER / kind
    for line in (folder / SUMS).read_text(encoding="utf-8").splitlines():
        expected, _, name = line.partition("  ")
        path = folder / name
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "no such file"
        if digest != expected:
            raise DamagedModelError(
                f"{path} is not what was committed: its SHA-256 is {digest}, {SUMS} says {expected}. "
                f"Restore it with `git checkout -- {path}`."
            )
    return folder
