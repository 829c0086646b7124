"""What real processes of `main_ppo` reported, kept in tests/data/verl: each file is the `reports.json` of a run, as it was left.

`test_reports.py` plants faults in them; the runs in `test_main_ppo*.py` check that theirs have the same shape, so that what is
tested there is what processes send. Where they do not, copy the run's file over the recorded one and look at the difference.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SCALER = {"class": "LossScaler", "enabled": True, "scale": 64.0}
"""What a worker in float16 reports as its trainer's scaler, which no recorded run has."""

FOLDER = Path(__file__).resolve().parents[2] / "data/verl"


def recorded(name: str) -> Any:
    """Return what the processes of a recorded run reported: "block", "workers" and "rollouts"."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def shape(found: Any) -> Any:
    """Return the names and types of everything in a report, without the values."""
    if isinstance(found, dict):
        return {name: shape(value) for name, value in sorted(found.items())}
    if isinstance(found, list):
        return [shape(found[0])] if found else []
    return type(found).__name__
