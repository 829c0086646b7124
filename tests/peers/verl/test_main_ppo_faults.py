"""What fails in one of verl's processes ends the run, with an error that says what it was, and never in a hang.

Refusals of what processes report are in `test_reports.py`; faults of single answers end the runs of `test_main_ppo.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mismatch_ext.rundata import read_run
from tests.peers.verl.cpu.faults import FAULT, MESSAGE
from tests.peers.verl.main_ppo import dtypes, lasting, run_verl
from tests.peers.verl.recorded import recorded, shape

pytestmark = pytest.mark.engine


def test_the_package_fails_in_the_rollout_only(dense: Path, tmp_path: Path) -> None:
    overrides = [*dtypes("float32"), "+mismatch.monitor={}"]
    run = run_verl(tmp_path, overrides, model=dense, plugin=True, env={FAULT: "no_plugin_in_the_rollout"})
    run.expect_failure()
    assert f"{MESSAGE}: mismatch_ext.adapters.verl" in run.log


def test_a_hang_is_ended_and_what_was_saved_is_there(dense: Path, tmp_path: Path) -> None:
    # Longer than a busy machine takes for a phase of a step; servers have ten minutes to start.
    hanging = ("+mismatch.monitor.stall_timeout=60", "trainer.save_freq=1")
    overrides = [*dtypes("float32"), *lasting(2), *hanging]
    run = run_verl(tmp_path, overrides, model=dense, plugin=True, env={FAULT: "failing_weight_update"})
    run.expect_failure(None)
    assert "StallError" in run.log and "updating the rollout's weights after step 1" in run.log
    saved = tmp_path / "checkpoints/global_step_1"
    assert (saved / "mismatch.json").is_file() and list((saved / "actor").glob("model_world_size_1_rank_0.pt"))
    # A run without the fault goes on from there, in the same metrics file.
    resuming = ("+mismatch.monitor={}", "trainer.resume_mode=auto")
    resumed = run_verl(tmp_path, [*dtypes("float32"), *lasting(2), *resuming], model=dense, plugin=True)
    assert [step["training/global_step"] for step in resumed.expect(1)] == [2]
    data = read_run(tmp_path / "checkpoints/mismatch")
    assert [step.step for step in data.steps][-1:] == [2]
    assert [end.status for end in data.ends] == ["failed", "completed"]
    # It hung between the checkpoint of step 1 and that step's log.
    assert {"resumed", "lost_log"} <= {event.name for event in data.events}
    assert shape(resumed.reports) == shape(recorded("dense"))
