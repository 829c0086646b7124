"""Measure TRL's and verl's own KL terms by exact enumeration: `python -m tests.kl_hosts`.

TRL is measured in every version that was run, and in the two around the change of its default; a version that `.venv` does not
hold is installed under `.cache/`, without its dependencies, and put in front on the path. What came out is written to
tests/oracles/kl/hosts.json, and the table of evidence/kl.md is printed. Tests measure again, and compare.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from mismatch_ext.versions import installed
from tests.models import tiny_model
from tests.oracles.kl import hosts

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache/trl"
TRL = ("1.16.0", "1.14.2", "1.13.0", "1.10.0", "1.9.0")
SCENARIOS = {"TRL": "tests.peers.trl.scenarios_kl_terms", "verl": "tests.peers.verl.in_process.scenarios_kl_terms"}


def measured(host: str, folders: Sequence[Path] = (), **payload: Any) -> list[dict[str, Any]]:
    """Return the terms of a host, measured in a process of its own with overlays in front on its path."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders)), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", SCENARIOS[host], "terms", json.dumps(payload, default=str)],
        cwd=ROOT,
        env={**environment, "VERL_USE_EXTERNAL_PLUGINS": "none"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise SystemExit(
            f"{host} with {[str(folder) for folder in folders]} ended with {done.returncode}:\n{done.stderr[-4000:]}"
        )
    return json.loads(lines[-1].removeprefix("RESULT "))


def overlay(version: str) -> Path | None:
    """Return a folder that holds a version of TRL, installed now if need be; None for the version in `.venv`."""
    if installed("trl") == version:
        return None
    target = CACHE / version
    if not target.is_dir():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE, ignore_cleanup_errors=True) as fresh:
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", fresh]
            subprocess.run([*pip, f"trl=={version}"], check=True, timeout=1800)
            Path(fresh).rename(target)
    return target


def main() -> int:
    """Measure every host and version, and write the file."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        model = tiny_model("dense", Path(scratch) / "model")
        for version in tqdm(TRL, unit="version", desc="TRL"):
            folder = overlay(version)
            found = measured("TRL", [folder] if folder else [], model=model, out=scratch)
            if {row["version"] for row in found} != {version}:
                raise SystemExit(f"asked for TRL {version}, but {folder} gives {found[0]['version']}")
            rows += found
    rows += measured("verl")
    lines = ",\n".join(json.dumps(row) for row in rows)
    hosts.FILE.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    hosts.main()
    return 0


if __name__ == "__main__":
    sys.exit(main())
