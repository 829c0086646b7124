"""`make bench`: what the primitives and a whole training step cost beside what others have."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.readme import shell

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]


def test_costs_beside_what_others_have(evidence: Callable[..., None]) -> None:
    """Each primitive beside the host's own or a plain computation of the same, as ratios: time of theirs over ours."""
    printed = shell("make bench")
    rows = [json.loads(line) for line in printed.splitlines() if not line.startswith("make")]
    assert rows and all(set(row) == {"name", "ours", "theirs", "ratio", "equal"} for row in rows)
    assert all(row["equal"] for row in rows)
    (step,) = [row for row in rows if row["name"].startswith("a training step of TRL")]
    (served,) = [
        row for row in rows if row["name"].startswith("a step of TRL with a vLLM server") and "processor" in row["name"]
    ]
    assert served["ratio"] > 1 / 1.1, served  # the checks of a step are a twentieth of it
    # Both sides do the same work but for what we add, and what we add is one pass over tokens in a step of several.
    assert step["ratio"] > 1 / 1.5, step
    evidence("bench", {row["name"]: row["ratio"] for row in rows if row["ratio"] is not None}, command="make bench")
    figures = {"ratio": 1 / step["ratio"], "seconds of ours": step["ours"], "seconds of stock": step["theirs"]}
    evidence("step_cost", {"what": step["name"], **figures}, command="make bench")
