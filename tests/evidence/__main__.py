"""Measure the claims: `python -m tests.evidence [--slice N]`. Writes evidence/, docs/evidence.md and figures of other pages."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time

from tests.evidence.machine import ROOT
from tests.evidence.pages import due, write_pages
from tests.evidence.slices import SLICES, Slice

# Seconds: twice what the longest slice is meant to take on two idle cores.
LIMIT = 1500.0


def command_of(chosen: Slice) -> list[str]:
    """Return what runs a slice's tests."""
    parallel = ["-n", str(chosen.jobs), "--dist", "loadfile"] if chosen.jobs > 1 else []
    return [sys.executable, "-m", "pytest", "--durations", "10", *parallel, *chosen.paths()]


def run(chosen: Slice, limit: float = LIMIT) -> int:
    """Run a slice's tests in a session of their own, and return pytest's exit code; 124 where a limit in seconds ended it."""
    process = subprocess.Popen(command_of(chosen), cwd=ROOT, start_new_session=True)
    try:
        return process.wait(timeout=limit)
    except subprocess.TimeoutExpired:
        print(
            f"slice {chosen.title!r} ({', '.join(chosen.files)}) ran for more than {limit:g} s, and was ended",
            flush=True,
        )
        return 124
    finally:
        # Engines and workers too, whose parent may be gone.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main() -> int:
    """Run all slices, or one of them, and rewrite what quotes them; return 1 when a test failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.evidence", description=__doc__)
    parser.add_argument("--slice", help=f"1 to {len(SLICES)}, or `commit` for the one that is due")
    parser.add_argument("--list", action="store_true", help="list the slices and end")
    parser.add_argument("--pages", action="store_true", help="rewrite what quotes the evidence, measure nothing")
    options = parser.parse_args()
    for number, found in enumerate(SLICES, start=1):
        print(f"slice {number} of {len(SLICES)}: {found.title} ({', '.join(found.files)})")
    if options.list:
        return 0
    if options.pages:
        write_pages()
        return 0
    if options.slice == "commit":
        number, why = due()
        print(f"running slice {number}: {why}", flush=True)
        numbers = [number]
    elif options.slice:
        if options.slice not in map(str, range(1, len(SLICES) + 1)):
            parser.error(f"--slice {options.slice!r} must be 1 to {len(SLICES)}, or `commit`")
        numbers = [int(options.slice)]
    else:
        numbers = list(range(1, len(SLICES) + 1))
    failed, lines = [], []
    for number in numbers:
        start = time.time()
        code = run(SLICES[number - 1])
        failed += [number] if code else []
        lines.append(f"slice {number}: {time.time() - start:.0f} s, {'failed' if code else 'passed'}")
    write_pages()
    print("\n".join(lines))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
