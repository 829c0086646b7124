"""verl's main_ppo, killed at random moments and resumed without help, ends as if nothing had stopped it."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models import tiny_model
from tests.peers.death import plain
from tests.peers.verl.main_ppo import KILLED, VerlRun, lasting, run_verl

KILLS, STEPS = 3, 6
pytestmark = [pytest.mark.nightly, pytest.mark.engine, pytest.mark.timeout(3600)]

# Every section that has a state.
BLOCK = (
    "+mismatch.precision.dtype=float32",
    "+mismatch.routing={mode:R3,measured:0.5}",
    "+mismatch.kl={coef:0.05,target_kl:0.01}",
    "+mismatch.lr={trigger:grad_norm,decay:0.9,baseline_window:1,surge_ratio:1.0001}",
)


def train(work: Path, model: Path, until: Callable[[], bool] | None = None) -> VerlRun:
    """Train to the end, from the last checkpoint if there is one, or be killed when it is time."""
    (work / "metrics.jsonl").unlink(missing_ok=True)  # verl's own, where a kill may have left half a line
    overrides = [*lasting(STEPS), *BLOCK, "trainer.save_freq=1", "trainer.resume_mode=auto"]
    return run_verl(work, overrides, model=model, plugin=True, timeout=600, until=until)


def next_checkpoint(work: Path, delay: float) -> Callable[[], bool]:
    """Return what tells that a checkpoint was named as the last so many seconds ago, which none was at the start."""
    tracker = work / "checkpoints/latest_checkpointed_iteration.txt"

    def last() -> str:
        return tracker.read_text() if tracker.exists() else ""

    before, since = last(), list[float]()

    def due() -> bool:
        if not since and last() != before:
            since.append(time.monotonic())
        return bool(since) and time.monotonic() - since[0] >= delay

    return due


def end_of(work: Path) -> dict[str, Any]:
    """Return weights, optimizer and our state of the last checkpoint."""
    folder = work / f"checkpoints/global_step_{STEPS}"
    found: dict[str, Any] = {}
    for name in ("model", "optim"):
        found[name] = plain(torch.load(folder / f"actor/{name}_world_size_1_rank_0.pt", weights_only=False))
    for name in ("mismatch.json", "actor/mismatch.json"):
        found[name] = json.loads((folder / name).read_text())
    # vLLM sums in an order that hangs on which requests arrive together, so that its scores differ in the last bits. A kill
    # may come between a checkpoint and its step's log, which the alarms have not seen then.
    for part in ("weight_sync", "monitor", "log"):
        found["mismatch.json"].pop(part, None)
    return found


def test_kills_over_verl_leave_no_trace(tmp_path: Path) -> None:
    model, draw = tiny_model("moe", tmp_path / "moe"), random.Random(0)
    train(tmp_path / "whole", model).expect(STEPS)
    work, killed = tmp_path / "killed", 0
    while killed < KILLS:
        ran = train(work, model, next_checkpoint(work, draw.uniform(0, 3)))
        if ran.code != KILLED:
            break
        killed += 1
    else:
        ran = train(work, model)
    assert killed > 0 and ran.code == 0, ran.log[-6000:]
    assert end_of(work) == end_of(tmp_path / "whole")
