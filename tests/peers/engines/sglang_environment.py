"""Runs scenarios in the environment that `make setup` builds, or in a stack's own, where that holds SGLang itself."""

from __future__ import annotations

import os
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from mismatch_ext.versions import installed
from tests.peers.scenarios import ROOT, Scenario, run_fresh

HELD = installed("sglang")
PYTHON = Path(sys.executable) if HELD else ROOT / ".venv-sglang/bin/python"
SHIMS = ROOT / "tests/peers/engines/sglang_cpu"


def _held_there() -> str | None:
    """Return the version of SGLang that its own environment holds; None if that has not been built."""
    packages = (ROOT / ".venv-sglang").glob("lib/python*/site-packages")
    found = (distribution.version for distribution in distributions(name="sglang", path=map(str, packages)))
    return next(found, None)


NEWEST, MAIN, OLDEST = "0.5.23", _held_there() or "0.5.18", "0.5.12"
VERSIONS = (HELD,) if HELD else tuple(dict.fromkeys((NEWEST, MAIN, OLDEST)))
RUN_FIRST = HELD or MAIN
"""The version of `make test`; the others are run by night."""


def environment(version: str, log: Path) -> dict[str, str]:
    """Return the variables that let one version of SGLang run on a CPU; calls of the kernel stub go to the log."""
    paths = [SHIMS] if version == (HELD or MAIN) else [ROOT / f".venv-sglang/sglang-{version}", SHIMS]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "SGLANG_USE_CPU_ENGINE": "1",
        "KERNEL_STUB_LOG": str(log),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore",
    }


def run_sglang(scenario: Scenario, version: str, folder: Path, **payload: Any) -> Any:
    """Run a scenario with a version of SGLang in a process of its own, and return its result.

    The result of a scenario gets "stub": how often names of the kernel stub were fetched and called.
    """
    assert PYTHON.exists(), f"{PYTHON} is missing: run `make setup`"
    log = folder / f"stub-{version}-{scenario.name}.log"
    result = run_fresh(scenario, payload, environment(version, log), timeout=600, python=PYTHON).expect()
    return {**result, "stub": stub_uses(log)}


def stub_uses(log: Path) -> dict[str, int]:
    """Count the lines of the kernel stub's log; it must exist, or the stub was not the one that was imported."""
    kinds = [line.split()[0] for line in log.read_text().splitlines()]
    return {"fetched": kinds.count("GET"), "called": kinds.count("CALL")}
