"""What ranks of TRL send to each other in a step: numbers, and objects only if there is something to say."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mismatch_ext.adapters.trl.host import TrainerRun
from torch import Tensor

from mismatch_ext.checks import Checks
from mismatch_ext.config import MismatchConfig
from mismatch_ext.log import RunLog
from mismatch_ext.names import TRL
from tests.unit.loops import Two

ACTS: dict[str, Any] = {"lr": {}, "monitor": {"alarms": {"reward": {"below": -9.0, "action": "stop"}}}}


def run_of(folder: Path, block: dict[str, Any], rank: int = 0) -> Any:
    """Return the block's side of a trainer with an engine whose last update was verified, and its two ranks."""
    found: Any = object.__new__(TrainerRun)
    parsed = MismatchConfig.parse(block)
    assert parsed is not None
    ranks, checks = Two(rank), Checks(parsed.acts, lambda: 1)
    accelerator = SimpleNamespace(scaler=None, is_main_process=rank == 0)
    vars(found).update(
        block=parsed,
        ranks=ranks,
        checks=checks,
        trainer=SimpleNamespace(
            use_vllm=True,
            accelerator=accelerator,
            state=SimpleNamespace(global_step=1),
            model=SimpleNamespace(training=True),
            is_deepspeed_enabled=False,
        ),
        checked=SimpleNamespace(verifier=SimpleNamespace(verdict=SimpleNamespace(gap_mean=0.5))),
        proves=True,
        grid=None,
        lr=None,
        _unwritten=[],
        log=RunLog(parsed, folder, info=dict, step=lambda: 1, names=TRL, ranks=ranks, checks=checks),
    )
    return found


def objects_of_log(run: Any) -> list[Any]:
    """Log a step, and return the objects that the rank has sent."""
    values = torch.full((2, 3), -1.0)
    run.log.sums.add_gap("train", old=values, rollout=values - 1e-3, mask=torch.ones(2, 3, dtype=torch.bool))
    run.ranks.asked.clear()
    metrics, _ = run.extra_metrics("train", True)
    assert metrics["mismatch/weight_sync_gap"] == 0.5 and "mismatch/k3_kl" in metrics
    run.log.watch(1, metrics)
    return [asked for asked in run.ranks.asked if not isinstance(asked, Tensor)]


@pytest.mark.parametrize("block", [{}, ACTS], ids=["measures", "acts"])
def test_a_log_sends_no_object(block: dict[str, Any], tmp_path: Path) -> None:
    assert objects_of_log(run_of(tmp_path, block)) == []


def test_words_of_a_rank_travel(tmp_path: Path) -> None:
    run = run_of(tmp_path, {}, rank=1)
    with pytest.warns(UserWarning, match="stale"):
        run.checks.note("weight_sync", "stale")
    run._unwritten = [("warning", "weight_sync", "doubtful")]
    failures, events = objects_of_log(run)
    assert [failed.message for failed in failures] == ["stale"] and events == [("warning", "weight_sync", "doubtful")]
