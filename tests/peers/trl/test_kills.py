"""Killed with SIGKILL at random moments and resumed by `resume_from_checkpoint=True`, a run ends as one that nothing stopped."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from mismatch_ext.rundata import read_run
from tests.peers.scenarios import Run
from tests.peers.trl.kills import TORN, Whole, killed_run, planned, whole_run


@pytest.fixture(scope="module")
def whole(run: Run, moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return whole_run(run, moe, tmp_path_factory.mktemp("whole"), "R3")


def test_five_kills_leave_no_trace(run: Run, moe: Path, tmp_path: Path, whole: Whole) -> None:
    draw = random.Random(1)
    # In the middle of each write that can leave a checkpoint torn, and while there is no file open.
    plans = [
        planned(draw, where)
        for where in ("torch.save", "trainer_state.json", "rotation", "metrics.jsonl", "generation")
    ]
    died = killed_run(run, moe, tmp_path, whole, plans)
    assert died == [plan["where"] for plan in plans]
    torn = [event for event in read_run(tmp_path / "mismatch").events if event.name == "torn_checkpoint"]
    assert {event.level for event in torn} == {"warning"} and len(torn) >= 2
    assert all("the last whole checkpoint before" in event.message for event in torn)
    assert set(died) & set(TORN)
