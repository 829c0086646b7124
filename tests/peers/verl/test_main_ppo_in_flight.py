"""Faults in whole runs of verl's own trainer that are no row's: what ends a run that acts, what goes on, and what is counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mismatch_ext.log_reading import read_run
from tests.models import tiny_model
from tests.peers.death import plain
from tests.peers.verl.cpu.faults import FAULT
from tests.peers.verl.main_ppo import dtypes, lasting, run_verl
from tests.peers.verl.test_main_ppo_ranks import TWO

pytestmark = pytest.mark.nightly

ACTING = "+mismatch.monitor.weight_sync=error"


def events_of(work: Path, *names: str) -> list[tuple[int, str, str]]:
    """Return step, name and level of a run's events of some names, in their order."""
    found = read_run(work / "checkpoints/mismatch").events
    return [(event.step, event.name, event.level) for event in found if event.name in names]


def test_a_silent_server_ends_nothing_and_two_doubtful_updates_in_a_row_end_the_run(tmp_path: Path) -> None:
    """Probes time out three times and the run goes on; one doubtful update is a warning, and the next one ends the run."""
    fault = "silent_server@1+2+3,doubtful_weights@4+5"
    run = run_verl(
        tmp_path, [*dtypes("float32"), ACTING, *lasting(7)], model=tiny_model("dense", tmp_path / "model"),
        plugin=True, env={FAULT: fault},
    )  # fmt: skip
    run.expect_failure(4)
    assert events_of(tmp_path, "weight_sync_unanswered", "weight_sync") == [
        (1, "weight_sync_unanswered", "warning"),
        (2, "weight_sync_unanswered", "warning"),
        (3, "weight_sync_unanswered", "warning"),
        (4, "weight_sync", "warning"),
        (5, "weight_sync", "error"),
    ]
    assert ["mismatch/weight_sync_gap" in step for step in run.steps] == [False, False, False, True]
    assert [step["mismatch/weight_sync_unanswered"] for step in run.steps] == [1, 2, 3, 0]
    assert "3 unknown, first at step 1, last at step 3" in run.log
    assert "One such update ends nothing: the next one is checked." in run.log
    assert "WeightSyncError: weight update 3: garbled." in run.log
    (end,) = read_run(tmp_path / "checkpoints/mismatch").ends
    assert (end.status, end.step) == ("failed", 5)


def parameters(work: Path, step: int) -> list[Any]:
    folder = work / f"checkpoints/global_step_{step}/actor"
    return [plain(torch.load(folder / f"model_world_size_2_rank_{rank}.pt", weights_only=False)) for rank in range(2)]


def test_nan_on_one_rank_a_full_disk_and_a_batch_of_bad_rows(tmp_path: Path) -> None:
    """No rank waits for one whose loss is not a number; a full disk ends nothing; a batch without a good row ends the run."""
    fault = "nan_on_one_rank@2,full_disk@3+4,nothing_finite@5"
    run = run_verl(
        tmp_path, [*TWO, "trainer.save_freq=1", *lasting(7)], model=tiny_model("dense", tmp_path / "model"),
        plugin=True, timeout=560, env={FAULT: fault},
    )  # fmt: skip
    steps = run.expect(5)
    assert [step["mismatch/skipped_steps"] for step in steps] == [0, 1, 0, 0, 0]
    # Neither the step whose gradient is not finite nor the one with no good row moves the weights: no momentum is left to act.
    of_steps = [parameters(tmp_path, step) for step in range(1, 6)]
    moved = [before != after for before, after in zip(of_steps, of_steps[1:], strict=False)]
    assert moved == [False, True, True, False]
    states = [(tmp_path / f"checkpoints/global_step_{step}/mismatch.json").exists() for step in range(1, 6)]
    assert states == [True, True, False, True, True]
    assert "The run goes on and its alarms stay on" in run.log
    data = read_run(tmp_path / "checkpoints/mismatch")
    assert [step.step for step in data.steps] == [1, 2, 4, 5]
    assert [event.data for event in data.events if event.name == "lines_lost"] == [{"lines": 1}]
    (ended,) = [event for event in data.events if (event.name, event.level) == ("bad_rows", "error")]
    assert ended.step == 5 and ended.message.startswith("16 of the 80 rows of steps 1 to 5 were bad")
    assert steps[4]["mismatch/bad_rows/rollout_logprobs"] == 16 and "actor/grad_norm" not in steps[4]
    assert list((tmp_path / "checkpoints/mismatch").glob("evidence-5*"))
    assert [end.status for end in data.ends] == ["completed"]
