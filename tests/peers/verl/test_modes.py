"""verl's three trainer modes: weights put aside that stay, and rules that count steps and not local updates."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.peers.scenarios import Run, named

scenarios = named("tests.peers.verl.in_process.scenarios_modes")


@pytest.mark.numeric
def test_weights_put_aside_are_those_of_before_the_update_where_they_lie_on_the_host(run: Run, dense: Path) -> None:
    found = run(scenarios.aside, model=dense).expect()
    stock, ours = found["DetachActorWorker"], found["MismatchDetachWorker"]
    # verl 0.9.1's copy follows the update: what should be the old policy is the present one.
    assert stock["old"] == pytest.approx(stock["moved"], rel=1e-3) and stock["moved"] > 1e-2
    assert ours["moved"] == stock["moved"] and ours["old"] <= 1e-6
    # The update is not undone by putting the old weights back for a while.
    assert ours["kept"] and ours["saved"] == [0]


@pytest.mark.numeric
def test_a_step_is_one_where_an_update_of_it_was_skipped(run: Run, dense: Path, tmp_path: Path) -> None:
    found = run(scenarios.skipped, model=dense, folder=str(tmp_path)).expect()
    assert found == pytest.approx([1e-3, 1e-3, 5e-4, 5e-4, 2.5e-4, 2.5e-4])


@pytest.mark.numeric
def test_a_step_is_led_once_and_one_without_statistics_is_refused(run: Run, dense: Path) -> None:
    found = run(scenarios.statistics, model=dense).expect()
    assert found["history"] == [20.0, 15.0]
    assert found["left_out"].startswith("ConfigError") and "gave no statistics before this update" in found["left_out"]
