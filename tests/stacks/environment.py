"""Build a stack's environment beside `.venv`, from empty and from exact pins. Standard library alone."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from typing import Any

from tests.stacks.cells import ROOT, Cell

STAMP = ".built.json"


def built(cell: Cell) -> dict[str, Any] | None:
    """Return when and in how many seconds a stack's environment was built; None where it is not, or of other pins."""
    stamp = cell.environment() / STAMP
    if not stamp.is_file():
        return None
    found: dict[str, Any] = json.loads(stamp.read_text(encoding="utf-8"))
    return found if found["inputs"] == inputs(cell) else None


def inputs(cell: Cell) -> str:
    """Return a digest of what decides an environment."""
    files = (cell.pins(), ROOT / "pyproject.toml")
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def python(cell: Cell) -> str:
    """Return the interpreter of a stack's environment."""
    return str(cell.environment() / "bin/python")


def build(cell: Cell) -> None:
    """Build a stack's environment, or leave the one that is there and of these pins.

    Nothing is resolved: every distribution has its exact version in the pins. That they go together is `session.py`'s to check.
    """
    if cell.folder:
        subprocess.run(["make", "setup"], cwd=ROOT, check=True)
        return
    if built(cell):
        return
    folder = cell.environment()
    print(
        f"[stack] building {cell.name} in {folder.relative_to(ROOT)} from {cell.pins().relative_to(ROOT)}", flush=True
    )
    start = time.time()
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    install = [python(cell), "-m", "pip", "install", "--quiet", "--no-deps"]
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    subprocess.run([*install, "-r", str(cell.pins())], check=True, env=environment)
    subprocess.run([*install, "--no-build-isolation", "-e", "."], check=True, cwd=ROOT, env=environment)
    stamp = {
        "inputs": inputs(cell),
        "seconds": round(time.time() - start),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }
    (folder / STAMP).write_text(json.dumps(stamp) + "\n", encoding="utf-8")
