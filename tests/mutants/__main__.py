"""Plant each fault in a copy of the repository and run the tests that must notice: `python -m tests.mutants [NAME ...]`.

The tests are first run as they are: one that fails without a fault notices nothing; `--passed` leaves that to `make test`. Then
each fault is applied, its tests are run, and the fault is taken out again. A fault is caught when one of its tests fails; one
that keeps tests from being collected is no fault but a broken file. Exits with 1 when a fault was not caught.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from tqdm import tqdm

from tests.mutants.fault import PRODUCT, ROOT, Fault, faults

LIMIT = 1200.0
"""Seconds that the tests of one fault may take."""
TOGETHER = 5400.0
"""Seconds that all of them may take, without a fault."""
NAMED = 3
"""Tests that are named of those that notice a fault: more are not waited for."""


def copy_tree(target: Path) -> None:
    """Copy what git tracks, with adapters and patches inside the package, so that the copy is what is imported there."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        source, copy = ROOT / name, target / name
        if source.is_symlink() or not source.is_file():
            continue
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, copy)
    for folder in PRODUCT[1:]:
        # The environment's editable install would import them from the repository itself.
        (target / PRODUCT[0] / folder).symlink_to(target / folder)
    for environment in (".venv", ".venv-sglang"):
        if (ROOT / environment).exists():
            (target / environment).symlink_to(ROOT / environment)


def failing(tree: Path, tests: tuple[str, ...], jobs: int = 1, limit: float = LIMIT, enough: int = 0) -> list[str]:
    """Run tests in a copy and return the names of those that fail, of which a number may be enough.

    Raises:
        RuntimeError: They could not be run to their end, or none ran.
    """
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch, "report.xml")
        options = ["-q", "-p", "no:cacheprovider", f"--junitxml={report}", f"--maxfail={enough}"]
        options += ["-n", str(jobs), "--dist", "loadgroup"] if jobs > 1 else []
        try:
            done = subprocess.run(
                [sys.executable, "-m", "pytest", *options, *tests],
                cwd=tree,
                env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(tree)},
                capture_output=True,
                text=True,
                timeout=limit,
            )
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"{' '.join(tests)}: not done after {limit:g} s") from error
        if done.returncode not in (0, 1) or not report.is_file():
            raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-1000:]}")
        cases = ElementTree.parse(report).getroot().findall(".//testcase")
    return [
        case.get("name", "") for case in cases if case.find("failure") is not None or case.find("error") is not None
    ]


def loads(tree: Path, fault: Fault) -> bool:
    """Tell whether the files that a fault changes are still Python."""
    return all(
        subprocess.run([sys.executable, "-m", "py_compile", tree / file], capture_output=True).returncode == 0
        for file in fault.files
    )


def main() -> int:
    """Run all, print which test caught which fault, and return 1 when one went unnoticed."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="parts of the names of faults (default: all)")
    parser.add_argument("--jobs", type=int, default=2, help="processes of pytest for the run without a fault")
    parser.add_argument(
        "--passed",
        action="store_true",
        help="leave out the run without a fault: `make test` has passed on this very tree",
    )
    parser.add_argument(
        "--named", type=int, default=NAMED, help=f"tests to wait for that notice a fault (default: {NAMED})"
    )
    options = parser.parse_args()
    chosen = faults(options.names)
    missed = []
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch).resolve()
        copy_tree(tree)
        # A node id of a file that is run whole would run its tests twice.
        wanted = dict.fromkeys(test for fault in chosen for test in fault.tests)
        whole = tuple(test for test in wanted if "::" not in test or test.partition("::")[0] not in wanted)
        print(
            f"{len(chosen)} planted faults"
            + ("" if options.passed else "; first the tests that must notice them, without any fault"),
            flush=True,
        )
        if not options.passed and (broken := failing(tree, whole, options.jobs, TOGETHER)):
            print(f"these fail without a fault, so they notice nothing: {', '.join(broken)}")
            return 1
        for fault in tqdm(chosen, unit="fault", file=sys.stderr):
            fault.apply(tree)
            caught, by = [], "none"
            try:
                if not loads(tree, fault):
                    raise RuntimeError(f"{', '.join(fault.files)} is no Python any more")
                caught = failing(tree, fault.tests, enough=options.named)
                by = ", ".join(caught) or by
            except RuntimeError as error:
                by = f"none: {error}"
            finally:
                fault.apply(tree, reverse=True)
            tqdm.write(f"{'caught' if caught else 'MISSED'}  {fault.name}: {fault.title}", file=sys.stdout)
            tqdm.write(f"        by {by}", file=sys.stdout)
            missed += [] if caught else [fault.name]
            sys.stdout.flush()
    print(
        f"{len(chosen) - len(missed)} of {len(chosen)} planted faults were caught"
        + "".join(f"; missed: {m}" for m in missed)
    )
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
