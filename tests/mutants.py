"""Plant each fault of mutants.toml in a copy of the repository, and run the tests that must notice it.

First the tests run without any fault: a test that fails then notices nothing. A fault is caught if one of its tests fails, and
not if they cannot be collected. Exits with 1 if a fault was missed or does not apply.
"""

from __future__ import annotations

import argparse
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypedDict

from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 600.0  # seconds that the tests of one fault may take


class Fault(TypedDict):
    """One table of mutants.toml."""

    name: str
    why: str
    file: str
    find: str
    replace: str
    tests: list[str]


def copy_tree(target: Path) -> None:
    """Copy what git tracks, so that the copy is imported there and not the repository."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        source, copy = ROOT / name, target / name
        if source.is_file() and not source.is_symlink():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copy)
    for folder in ("adapters", "patches"):  # the environment's editable install would import the repository's own
        (target / "mismatch_ext" / folder).symlink_to(target / folder)
    for environment in (".venv", ".venv-sglang"):
        (target / environment).symlink_to(ROOT / environment)


def failing(tree: Path, tests: list[str], *options: str, jobs: int = 1, limit: float | None = None) -> list[str]:
    """Run tests in a copy and return the names of those that fail.

    Raises:
        RuntimeError: They could not be collected or run to their end.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, *tests]
    threads = str(max(1, (os.cpu_count() or 1) // jobs))
    own = {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": threads}
    try:
        done = subprocess.run(command, cwd=tree, env=os.environ | own, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"tests were not done after {limit:g} s") from error
    if done.returncode not in (0, 1):  # 2 and 4: not collected; 5: no tests
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-1000:]}")
    return re.findall(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", done.stdout, flags=re.M)


def stale(faults: list[Fault]) -> list[str]:
    """Say which faults have lost their place, because the code that they break was changed or is gone."""
    found = []
    for fault in faults:
        file = ROOT / fault["file"]
        count = file.read_text(encoding="utf-8").count(fault["find"]) if file.is_file() else 0
        if count != 1:
            found.append(f"DOES NOT APPLY {fault['name']}: `find` is {count} times in {fault['file']}")
    return found


def verdict(fault: Fault, trees: queue.Queue[Path], jobs: int) -> str:
    """Plant a fault in a copy that nobody uses, run its tests, restore the copy, and say how it went."""
    tree = trees.get()
    file = tree / fault["file"]
    whole = file.read_text(encoding="utf-8")
    try:
        broken = whole.replace(fault["find"], fault["replace"])
        compile(broken, fault["file"], "exec")
        file.write_text(broken, encoding="utf-8")
        caught = failing(tree, fault["tests"], "-x", jobs=jobs, limit=LIMIT)
        return f"caught {fault['name']} by {caught[0]}" if caught else f"MISSED {fault['name']}: {fault['why']}"
    except (RuntimeError, SyntaxError) as error:
        return f"DOES NOT APPLY {fault['name']}: {error}"
    finally:
        file.write_text(whole, encoding="utf-8")
        trees.put(tree)


def main() -> int:
    """Plant all faults, or those whose names have one of the given parts."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME_PART", help="plant only faults with this in their names")
    parser.add_argument("--jobs", type=int, default=2, help="copies that run at the same time (default: 2)")
    options = parser.parse_args()
    every: list[Fault] = tomllib.loads((ROOT / "tests/mutants.toml").read_text(encoding="utf-8"))["fault"]
    chosen = [fault for fault in every if not options.names or any(part in fault["name"] for part in options.names)]
    if not chosen:
        parser.error("no fault has such a name")
    if lost := stale(chosen):  # said in a second, and not after an hour
        print(*lost, sep="\n")
        return 1
    wanted = sorted({test for fault in chosen for test in fault["tests"]})
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(options.jobs) as pool:
        trees: queue.Queue[Path] = queue.Queue()
        for number in range(options.jobs):
            copy_tree(tree := Path(scratch).resolve() / str(number))
            trees.put(tree)
        print(f"{len(chosen)} faults. First their tests without a fault.", flush=True)
        if already := failing(tree, wanted, "-n", str(options.jobs), "--dist", "loadfile", jobs=options.jobs):
            print("These tests fail without a fault:", *already, sep="\n")
            return 1
        found = pool.map(lambda fault: verdict(fault, trees, options.jobs), chosen)
        caught = 0
        for line in tqdm(found, total=len(chosen), unit="fault"):
            tqdm.write(line, file=sys.stdout)
            caught += line.startswith("caught")
    print(f"{caught} of {len(chosen)} faults were caught.")
    return int(caught < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
