"""TRL with vLLM in bfloat16: a float32 trainer is told that its updates do not arrive, a bfloat16 one has nothing to be told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.peers.scenarios import Run, named

scenarios = named("tests.peers.trl.scenarios_grid")

pytestmark = pytest.mark.engine
SMALL, LARGE = 1e-5, 1e-1


def said(found: dict[str, Any]) -> list[tuple[str, int]]:
    """Return the names and steps of what a run says of its engine's grid."""
    return [
        (name, step) for name, step, message in found["events"] if name == "coarse_engine" or "engine_moved" in message
    ]


def test_updates_that_do_not_arrive_are_warned_of(run: Run, dense: Path, tmp_path: Path) -> None:
    found = run(scenarios.train, model=dense, out=tmp_path, dtype="float32", learning_rate=SMALL).expect()
    assert found["dtypes"] == ["float32", "bfloat16"]
    assert all(share < 0.1 for share in found["shares"]) and max(found["shares"]) > 0
    assert said(found) == [("coarse_engine", 2), ("alarm", 3)]  # within the third step, and after it
    assert len(found["told"]) >= 1 and "Give both sides one dtype" in found["told"][0]


@pytest.mark.parametrize(
    "given",
    [{"bf16": True, "learning_rate": SMALL}, {"learning_rate": LARGE}],
    ids=["autocast, under which the trainer rounds as the engine does", "large rate"],
)
def test_updates_that_arrive_are_not(run: Run, dense: Path, tmp_path: Path, given: dict[str, Any]) -> None:
    found = run(scenarios.train, model=dense, out=tmp_path, dtype="float32", **given).expect()
    assert said(found) == [] and found["told"] == []
    if given["learning_rate"] == LARGE:
        assert all(share > 0.5 for share in found["shares"])
