"""What was measured, as a file: curves of every run, machine, versions, date and commit."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from benchmarks.harness import measured_on
from benchmarks.stability.train import Curves

ROOT = Path(__file__).resolve().parents[2]
RECORDED = Path(__file__).with_name("recorded.json")
RECORDED_REAL = Path(__file__).with_name("recorded_real.json")
Runs = dict[str, dict[int, Curves]]
"""By arm and seed."""


def record(runs: Runs, to: Path) -> None:
    """Write the curves, four digits each, with what they were measured on."""
    kept = {name: {str(seed): _short(curves) for seed, curves in seeds.items()} for name, seeds in runs.items()}
    to.write_text(json.dumps({"measured": measured_on(), "runs": kept}, separators=(",", ":")) + "\n", encoding="utf-8")


def recorded(file: Path) -> tuple[dict[str, Any], Runs]:
    """Return what was measured on, and the runs."""
    found = json.loads(file.read_text(encoding="utf-8"))
    runs = {
        name: {int(seed): {key: _numbers(values) for key, values in curves.items()} for seed, curves in seeds.items()}
        for name, seeds in found["runs"].items()
    }
    return found["measured"], runs


def _short(curves: Curves) -> dict[str, list[float | None]]:
    return {
        name: [float(f"{value:.4g}") if math.isfinite(value) else None for value in values]
        for name, values in curves.items()
        if values
    }


def _numbers(values: list[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]
