"""Killed with SIGKILL at random moments and resumed by `resume_from_checkpoint=True`, a run ends as one that nothing stopped."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from mismatch_ext.log_reading import read_run
from tests.peers.scenarios import Run, named
from tests.peers.trl.kills import Whole, killed_run, planned, whole_run

scenarios = named("tests.peers.trl.scenarios_kills")


@pytest.fixture(scope="module")
def whole(run: Run, moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return whole_run(run, moe, tmp_path_factory.mktemp("whole"), "R2")


def test_five_kills_leave_no_trace(run: Run, moe: Path, tmp_path: Path, whole: Whole) -> None:
    draw = random.Random(1)
    # In the middle of each write that can leave a checkpoint torn, and while there is no file open.
    moments = ("torch.save", "trainer_state.json", "rotation", "metrics", "generation")
    plans = [planned(draw, where) for where in moments]
    assert killed_run(run, moe, tmp_path, whole, plans) == list(moments)


def test_changed_settings_hold_and_are_told(run: Run, moe: Path, tmp_path: Path) -> None:
    def go(**rest: Any) -> Any:
        return run(scenarios.leg, model=moe, out=tmp_path, mode="R2", **rest)

    go(steps=2).expect()
    changed = {
        "kl": {"coef": 0.2, "target_kl": 1e-3},
        "lr": {"trigger": "grad_norm", "decay": 0.5, "baseline_window": 1, "surge_ratio": 1.0001},
    }
    resumed = go(steps=3, resume=True, changed=changed)
    resumed.expect()
    data = read_run(tmp_path / "mismatch")
    told = [event.message for event in data.events if event.name == "settings_changed"]
    assert len(told) == 2 and all(message in resumed.stderr for message in told)
    assert "mismatch.kl.coef was 0.05 and is 0.2" in told[0] and "mismatch.lr.decay was 0.9 and is 0.5" in told[0]
    assert "begins anew from 0.2" in told[1]
    coefficients = data.series("mismatch/kl_coef")[1]
    assert coefficients[0] == 0.05 and coefficients[1] != 0.05 and coefficients[2] == 0.2
