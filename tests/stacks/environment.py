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
from pathlib import Path
from typing import Any

from tests.stacks.cells import ROOT, Cell

STAMP = ".built.json"


def built(cell: Cell) -> dict[str, Any] | None:
    """Return when and in how many seconds a stack's environment was built; None where it is not, or of other pins."""
    stamp = cell.environment() / STAMP
    if not stamp.is_file():
        return None
    found: dict[str, Any] = json.loads(stamp.read_text(encoding="utf-8"))
    return found if found["pins"] == digest(cell.pins()) else None


def digest(file: Path) -> str:
    """Return a digest of a file."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


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
    install = [python(cell), "-m", "pip", "install", "--quiet", "--no-deps"]
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    ours = [*install, "--no-build-isolation", "-e", "."]
    project = digest(ROOT / "pyproject.toml")
    if stamp := built(cell):
        if stamp["project"] != project:
            subprocess.run(ours, check=True, cwd=ROOT, env=environment)
            _write(cell, {**stamp, "project": project})
        return
    folder = cell.environment()
    print(
        f"[stack] building {cell.name} in {folder.relative_to(ROOT)} from {cell.pins().relative_to(ROOT)}", flush=True
    )
    start = time.time()
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    subprocess.run([*install, "-r", str(cell.pins())], check=True, env=environment)
    subprocess.run(ours, check=True, cwd=ROOT, env=environment)
    stamp = {
        "pins": digest(cell.pins()),
        "project": project,
        "seconds": round(time.time() - start),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }
    _write(cell, stamp)


def _write(cell: Cell, stamp: dict[str, Any]) -> None:
    (cell.environment() / STAMP).write_text(json.dumps(stamp) + "\n", encoding="utf-8")
