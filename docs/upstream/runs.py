"""Runs scripts in processes of their own: one for all of a peer, one for each that starts an engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from docs.upstream.scripts import Script
from docs.upstream.shown import NOT_INSTALLED, Shown
from mismatch_ext.versions import installed

ROOT = Path(__file__).resolve().parents[2]
SGLANG = ROOT / ".venv-sglang/bin/python"
SHIMS = ROOT / "tests/peers/engines/sglang_cpu"
LINE = "SHOWN "
LIMIT = 400  # seconds of one process


def groups(scripts: Sequence[Script]) -> list[list[Script]]:
    """Return the scripts in the order of their peers, those together that share a process."""
    ordered = sorted(scripts, key=lambda script: (script.peer, script.alone, script.name))
    return [list(group) for _, group in groupby(ordered, key=lambda one: (one.peer, one.alone and one.name))]


def run(group: Sequence[Script]) -> list[Shown]:
    """Run a group of scripts, each without the workaround and then with it.

    Raises:
        RuntimeError: The process ended before all of them had answered.
    """
    peer = group[0].peer
    python, variables = Path(sys.executable), {"PYTHONPATH": str(ROOT)}
    if peer == "sglang" and installed("sglang") is None:
        # On a CPU it takes an import or two that its wheel lacks, as SGLang's tests do.
        python, variables = SGLANG, {"PYTHONPATH": f"{SHIMS}:{ROOT}", "SGLANG_USE_CPU_ENGINE": "1"}
        variables["KERNEL_STUB_LOG"] = os.devnull
    if not python.exists():
        return [Shown(one.name, peer, None, applied, NOT_INSTALLED) for one in group for applied in (False, True)]
    names = [script.name for script in group]
    ran = subprocess.run(
        [str(python), "-W", "ignore", "-m", "docs.upstream.shown", *names],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **variables},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    found = [Shown(**json.loads(line[len(LINE) :])) for line in ran.stdout.splitlines() if line.startswith(LINE)]
    if ran.returncode or len(found) != 2 * len(group):
        raise RuntimeError(
            f"{', '.join(names)} ended with {ran.returncode}:\n{ran.stdout[-2000:]}\n{ran.stderr[-4000:]}"
        )
    return found
