"""Build stacks and run their tests: `python -m tests.stacks NAME | commit | all [--quick]`. Standard library alone."""

from __future__ import annotations

import argparse
import subprocess
import sys

from tests.stacks.cells import CELLS, ROOT, Cell, pick
from tests.stacks.environment import build, python
from tests.turns import commits


def run(cell: Cell, quick: bool, jobs: str) -> int:
    """Build a stack, run its tests with its own interpreter, and return 1 when anything failed."""
    try:
        build(cell)
    except subprocess.CalledProcessError as error:
        print(f"[stack] {cell.name} could not be built: {error}", file=sys.stderr)
        return 1
    command = [python(cell), "-m", "tests.stacks.session", cell.name, "--jobs", jobs, *(["--quick"] if quick else [])]
    return subprocess.run(command, cwd=ROOT).returncode


def main() -> int:
    """Run one stack, the one whose turn it is, or all; return 1 when anything failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.stacks", description=__doc__)
    parser.add_argument("stack", help=f"one of {', '.join(CELLS)}; `commit` for the one whose turn it is, or `all`")
    parser.add_argument("--quick", action="store_true", help="a selection of the stack's tests; records nothing")
    parser.add_argument("--jobs", default="1", help="tests that run at once")
    options = parser.parse_args()
    if options.stack == "commit":
        name, why = pick(commits())
        print(f"[stack] {why}", flush=True)
        names = [name]
    elif options.stack in CELLS or options.stack == "all":
        names = list(CELLS) if options.stack == "all" else [options.stack]
    else:
        parser.error(f"stack {options.stack!r} must be one of {', '.join(CELLS)}, or `commit`, or `all`")
    failed = [name for name in names if run(CELLS[name], options.quick, options.jobs)]
    print(f"[stack] failed: {', '.join(failed)}" if failed else f"[stack] passed: {', '.join(names)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
