"""Run a stack's tests with its own interpreter: `python -m tests.stacks.session NAME`; writes evidence/stacks/NAME.json."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from mismatch_ext.versions import installed
from tests.evidence.machine import provenance
from tests.stacks import page
from tests.stacks.cells import CELLS, ROOT, Cell
from tests.stacks.environment import built
from tests.stacks.pins import pinned

# Seconds for all tests of a stack: several times what they take on two idle cores.
LIMITS = {"quick": 1500.0, "full": 3600.0}

Outcome = dict[str, Any]
"""How the tests of a feature ended: `passed`, a number; `failed`, the names of all others, skipped ones too; `seconds`."""


def apart(pins: Mapping[str, str], left_out: Sequence[str], overrides: Sequence[str] = ()) -> Iterator[str]:
    """Yield what is wrong with this interpreter's environment: versions that are not the pinned ones, and requirements unmet.

    Args:
        pins: Versions by canonical name.
        left_out: Distributions that may be missing.
        overrides: Requirements that hold in the place of what is asked for of the same distributions.
    """
    here = {canonicalize_name(found.name): found for found in metadata.distributions()}
    for name, version in pins.items():
        found = here[name].version if name in here else None
        if found is None or found.partition("+")[0] != version:
            yield f"{name} is pinned to {version}, and {found or 'nothing'} is installed"
    allowed = {canonicalize_name(name) for name in left_out}
    instead = {canonicalize_name(one.name): one for one in map(Requirement, overrides)}
    # Ours alone: pip and what came with the interpreter's venv are not in the pins.
    for name in pins.keys() & here.keys():
        for requirement in map(Requirement, here[name].requires or []):
            wanted = canonicalize_name(requirement.name)
            if wanted in allowed or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
                continue
            version = here[wanted].version if wanted in here else None
            # A CUDA build in the place of a CPU build is one of the same version.
            wants = SpecifierSet(str(instead.get(wanted, requirement).specifier).replace("+cpu", ""))
            if version is None or not wants.contains(version, prereleases=True):
                yield f"{name} {here[name].version} asks for {requirement}, and {version or 'nothing'} is installed"


def read_report(report: Path, tests: Mapping[str, Sequence[str]]) -> dict[str, Outcome]:
    """Read pytest's JUnit report, feature by feature.

    Args:
        report: The file.
        tests: By feature, files, tests or single cases; a case counts for each feature that names it.
    """
    good: dict[str, bool] = {}  # a test whose teardown fails is reported twice
    seconds: dict[str, float] = defaultdict(float)
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        nodeid = _nodeid(case.get("classname") or "", case.get("name") or "")
        bad = any(case.find(kind) is not None for kind in ("failure", "error", "skipped"))
        good[nodeid] = good.get(nodeid, True) and not bad
        seconds[nodeid] += float(case.get("time") or 0)
    outcomes = {}
    for feature, names in tests.items():
        missing = [name for name in names if not any(_is_of(nodeid, name) for nodeid in good)]
        chosen = [nodeid for nodeid in good if any(_is_of(nodeid, name) for name in names)]
        outcomes[feature] = {
            "passed": sum(good[nodeid] for nodeid in chosen),
            "failed": [nodeid for nodeid in chosen if not good[nodeid]] + [f"{name} did not run" for name in missing],
            "seconds": round(sum(seconds[nodeid] for nodeid in chosen)),
        }
    return outcomes


def _nodeid(classname: str, name: str) -> str:
    """Return a case's name as pytest takes it, from that of its module, and of its class where it is in one."""
    module, _, group = re.sub(r"\.([A-Z]\w*)$", r"::\1", classname).partition("::")
    # Behind it, pytest-xdist notes the group that a case ran with.
    name = re.sub(r"^([^\[]+|.*\])@[^\]]*$", r"\1", name)
    return "::".join([f"{module.replace('.', '/')}.py", *([group] if group else []), name])


def _is_of(nodeid: str, name: str) -> bool:
    """Tell whether a case is one of those that a file, a test or a case names."""
    return nodeid == name or nodeid.startswith((f"{name}[", f"{name}::"))


def run_tests(cell: Cell, quick: bool, jobs: int) -> tuple[dict[str, Outcome], str]:
    """Run a stack's tests in one pytest, and return the outcomes by feature, and what kept it from its end."""
    tests = cell.selected(quick)
    limit = LIMITS["quick" if quick else "full"]
    together = ["-n", str(jobs), "--dist", "loadgroup", "--no-loadscope-reorder"] if jobs > 1 else []
    chosen = dict.fromkeys(test for names in tests.values() for test in names)
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-p",
                "no:cacheprovider",
                *together,
                f"--junitxml={report}",
                *chosen,
            ],
            cwd=ROOT,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            start_new_session=True,
        )
        try:
            code = process.wait(limit)
            trouble = "" if code in (0, 1) else f"pytest ended with {code}"
        except subprocess.TimeoutExpired:
            trouble = f"not done after {limit:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):  # engines and workers too, whose parent may be gone
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if not report.is_file():
            return {}, trouble or "pytest wrote no report"
        return read_report(report, tests), trouble


def main() -> int:
    """Check the environment, run the tests, print them by feature and record a full run; return 1 when anything failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.stacks.session", description=__doc__)
    parser.add_argument("stack", choices=CELLS)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    cell = CELLS[options.stack]
    # The repository's own environments are `make setup`'s to resolve.
    pins = {} if cell.folder else pinned(cell.pins().read_text(encoding="utf-8"))
    if wrong := list(apart(pins, cell.left_out, cell.overrides)):
        print(
            f"[stack] {cell.name}: the environment is not the one of {cell.pins().relative_to(ROOT)}:",
            *wrong,
            sep="\n  ",
        )
        return 1
    start = time.time()
    outcomes, trouble = run_tests(cell, options.quick, options.jobs)
    seconds = round(time.time() - start)
    for feature, outcome in outcomes.items():
        print(f"[stack] {cell.name}: {feature}: {outcome['passed']} passed, {len(outcome['failed'])} failed")
    total = sum(outcome["passed"] for outcome in outcomes.values())
    print(f"[stack] {cell.name}: {total} passed in {seconds} s{f'; {trouble}' if trouble else ''}", flush=True)
    if not options.quick:
        write(cell, outcomes, trouble, seconds, options.jobs)
    return int(bool(trouble) or not outcomes or any(outcome["failed"] for outcome in outcomes.values()))


def write(cell: Cell, outcomes: dict[str, Outcome], trouble: str, seconds: int, jobs: int) -> None:
    """Write evidence/stacks/NAME.json: what was run, how it ended, on what and with what."""
    record = {
        "stack": cell.name,
        "command": f"make stack STACK={cell.name}",
        "holds": {name: installed(name) for name in cell.holds},
        "built": {name: value for name, value in (built(cell) or {}).items() if name in ("seconds", "date")},
        "features": outcomes,
        "trouble": trouble,
        "seconds": seconds,
        "jobs": jobs,
        **provenance(),
    }
    page.RECORDS.mkdir(parents=True, exist_ok=True)
    path = page.RECORDS / f"{cell.name}.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    page.main()


if __name__ == "__main__":
    sys.exit(main())
