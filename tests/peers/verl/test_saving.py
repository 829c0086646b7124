"""The driver's state in verl's checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.peers.scenarios import Run, named

if TYPE_CHECKING:
    from tests.peers.verl.in_process import scenarios_saving as scenarios
else:
    scenarios = named("tests.peers.verl.in_process.scenarios_saving")


def test_a_checkpoint_that_a_callback_has_moved_away_does_not_come_back(run: Run) -> None:
    found = run(scenarios.moved_away).expect()
    # Written with the checkpoint; not again once the folder is gone.
    assert found["uploaded"]["lr"] == {"waiting": [{"f_tau": 0.5}]} and not found["local"]
