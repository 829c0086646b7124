"""verl's asynchronous modes, ended by an alarm and by a kill while answers are in flight: each goes on from what was saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mismatch_ext.log_reading import read_run
from tests.models import tiny_model
from tests.peers.verl.main_ppo import KILLED, VerlRun, run_verl
from tests.peers.verl.modes import COLOCATE, SEPARATE

pytestmark = pytest.mark.nightly

BLOCK = ("+mismatch.precision.dtype=float32", "+mismatch.routing={mode:R3,measured:1.0}", "+mismatch.lr.period=2")
STOP = "+mismatch.monitor.alarms={response_length/mean:{above:1e-9,patience:1,action:stop}}"
LAST = 12
"""More steps than are trained before the kill."""


@pytest.mark.parametrize("mode", [COLOCATE, SEPARATE], ids=["colocate", "separate"])
def test_a_run_that_is_stopped_or_killed_goes_on_from_what_was_saved(mode: tuple[str, ...], tmp_path: Path) -> None:
    model, metrics = tiny_model("moe", tmp_path / "moe"), tmp_path / "metrics.jsonl"
    saved = tmp_path / "checkpoints/latest_checkpointed_iteration.txt"

    def ran(*overrides: str, steps: int = LAST, until: Callable[[], bool] | None = None) -> VerlRun:
        metrics.unlink(missing_ok=True)
        settings = [*BLOCK, *mode, *overrides, "trainer.resume_mode=auto", f"trainer.total_training_steps={steps}"]
        return run_verl(tmp_path, settings, model=model, plugin=True, until=until)

    def step_is_logged() -> bool:
        """Its metrics come after its checkpoint."""
        return metrics.exists() and metrics.read_text().count("\n") >= 1

    stopped = ran(STOP)
    assert stopped.code == 0 and saved.read_text() == "1", stopped.log[-6000:]
    killed = ran("trainer.save_freq=1", until=step_is_logged)
    assert killed.code == KILLED
    after = int(saved.read_text())
    completed = ran(steps=after + 1)
    assert completed.code == 0, completed.log[-6000:]
    assert [int(step["training/global_step"]) for step in completed.steps] == [after + 1]
    for resumed in (killed, completed):
        assert "training prompt groups from TransferQueue" in resumed.log
        assert "Restored 0 training" not in resumed.log
    data = read_run(tmp_path / "checkpoints/mismatch")
    assert data.ends[-1].status == "completed"
    assert not [event for event in data.events if event.name == "weight_sync"]
    # The rule goes on as if nothing had happened; the kill may come between a checkpoint and its step's log.
    logged = {step.step: step.metrics["mismatch/lr_multiplier"] for step in data.steps}
    assert len(logged) >= after
    for step, multiplier in logged.items():
        assert multiplier == max(0.1, 0.5 ** ((step - 1) // 2)), step
