"""Resolve what a stack's own command would install on a machine with a GPU: `python -m tests.stacks.resolve NAME`.

pip or uv, as the command says, resolves it and installs nothing; evidence/installs/NAME.json keeps the versions of what makes
the stack.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.stacks.cells import CELLS, ROOT, Cell
from tests.stacks.page import INSTALLS
from tests.stacks.session import pinned


def requirements(cell: Cell) -> list[str]:
    """Return what the command asks pip for, with this checkout in the place of the published package."""
    words = shlex.split(cell.install.removeprefix("uv ").replace(" --override overrides.txt", ""))[2:]
    words = [word for word in words if not word.startswith("-")]
    return [word.replace("mismatch-ext", str(ROOT)) for word in words]


def record(cell: Cell, report: Mapping[str, Any], date: str) -> dict[str, Any]:
    """Return what is kept of pip's report.

    Args:
        cell: The stack.
        report: As `pip install --report` writes it.
        date: When it was resolved.
    """
    found = {one["metadata"]["name"].lower(): one["metadata"]["version"] for one in report["install"]}
    return {
        "stack": cell.name,
        "command": cell.install,
        "date": date,
        "python": platform.python_version(),
        # An index may hold CPU builds of the same versions, which say so after a plus.
        "holds": {name: found[name].partition("+")[0] for name in cell.holds},
    }


def by_pip(cell: Cell, scratch: Path) -> dict[str, Any]:
    """Return pip's report of what it would install."""
    report = scratch / "report.json"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
    subprocess.run([*pip, f"--report={report}", *requirements(cell)], check=True)
    found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return found


def by_uv(cell: Cell, scratch: Path) -> dict[str, Any]:
    """Return what uv, which has to be on the path, would install, in the form of pip's report."""
    wanted, overrides, found = (scratch / name for name in ("wanted.in", "overrides.txt", "found.txt"))
    wanted.write_text("\n".join(requirements(cell)))
    overrides.write_text("\n".join(cell.overrides))
    uv = ["uv", "pip", "compile", "--quiet", f"--python={sys.executable}", f"--override={overrides}", "--output-file"]
    subprocess.run([*uv, str(found), str(wanted)], check=True)
    pins = pinned(found.read_text(encoding="utf-8"))
    return {"install": [{"metadata": {"name": name, "version": version}} for name, version in pins.items()]}


def main() -> None:
    """Resolve stacks' commands and write what came out."""
    parser = argparse.ArgumentParser(prog="python -m tests.stacks.resolve", description=__doc__)
    parser.add_argument("stacks", nargs="+", choices=CELLS)
    for name in parser.parse_args().stacks:
        cell = CELLS[name]
        with tempfile.TemporaryDirectory() as scratch:
            found = (by_uv if cell.install.startswith("uv ") else by_pip)(cell, Path(scratch))
        INSTALLS.mkdir(parents=True, exist_ok=True)
        kept = record(cell, found, datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"))
        (INSTALLS / f"{name}.json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
