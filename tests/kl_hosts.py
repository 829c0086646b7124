"""Measure TRL's and verl's own KL terms by exact enumeration: `python -m tests.kl_hosts`.

What came out is written to tests/oracles/kl/hosts.json, where rows of versions that were installed earlier stay, and the table
of evidence/kl.md is printed. Tests measure again, and compare.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.models import tiny_model
from tests.oracles.kl import hosts

ROOT = Path(__file__).resolve().parents[1]
SCENARIOS = {"TRL": "tests.peers.trl.scenarios_kl_terms", "verl": "tests.peers.verl.in_process.scenarios_kl_terms"}


def measured(host: str, **payload: Any) -> list[dict[str, Any]]:
    """Return the terms of a host, measured in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", SCENARIOS[host], "terms", json.dumps(payload, default=str)],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "VERL_USE_EXTERNAL_PLUGINS": "none"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise SystemExit(f"{host} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return json.loads(lines[-1].removeprefix("RESULT "))


def main() -> int:
    """Measure both hosts, and put what came out in the place of the same versions' rows."""
    with tempfile.TemporaryDirectory() as scratch:
        found = measured("TRL", model=tiny_model("dense", Path(scratch) / "model"), out=scratch)
    found += measured("verl")
    versions = {(row["host"], row["version"]) for row in found}
    kept = json.loads(hosts.FILE.read_text(encoding="utf-8"))
    rows = found + [row for row in kept if (row["host"], row["version"]) not in versions]
    # The newest version of TRL comes first, and verl last.
    rows.sort(key=lambda row: row["host"] == "verl")
    lines = ",\n".join(json.dumps(row) for row in rows)
    hosts.FILE.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    hosts.main()
    return 0


if __name__ == "__main__":
    sys.exit(main())
