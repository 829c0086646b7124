"""What was measured, as a file: curves of every run, machine, versions, date and commit."""

from __future__ import annotations

import datetime
import json
import math
import platform
import subprocess
from pathlib import Path
from typing import Any

from mismatch_ext.versions import installed

ROOT = Path(__file__).resolve().parents[2]
RECORDED = Path(__file__).with_name("recorded.json")
RECORDED_REAL = Path(__file__).with_name("recorded_real.json")
Curves = dict[str, list[float]]
Runs = dict[str, dict[int, Curves]]


def record(runs: Runs, to: Path = RECORDED) -> None:
    """Write the curves, four digits each, with what they were measured on."""
    kept = {name: {str(seed): _short(curves) for seed, curves in seeds.items()} for name, seeds in runs.items()}
    found = {"measured": measured(), "runs": kept}
    to.write_text(json.dumps(found, separators=(",", ":")) + "\n", encoding="utf-8")


def recorded(file: Path = RECORDED) -> tuple[dict[str, Any], Runs]:
    """Return what was measured on, and the runs."""
    found = json.loads(file.read_text(encoding="utf-8"))
    runs = {
        name: {int(seed): {key: _numbers(values) for key, values in curves.items()} for seed, curves in seeds.items()}
        for name, seeds in found["runs"].items()
    }
    return found["measured"], runs


def measured() -> dict[str, Any]:
    """Return machine, versions, date and commit."""
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    commit = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True)
    return {
        "cpu": cpu,
        "versions": {name: installed(name) for name in ("torch", "transformers", "trl", "vllm")},
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit.stdout.strip(),
    }


def _short(curves: Curves) -> dict[str, list[float | None]]:
    return {
        name: [float(f"{value:.4g}") if math.isfinite(value) else None for value in values]
        for name, values in curves.items()
        if values
    }


def _numbers(values: list[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]
