"""The `lr` section in the real TRL: what is applied is the schedule times the rule, and nothing else changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.peers.scenarios import Run, named

scenarios = named("tests.peers.trl.scenarios_lr")


def test_a_run_without_saved_state_is_joined_with_a_warning(run: Run, dense: Path, tmp_path: Path) -> None:
    ran = run(scenarios.joined, model=dense, out=tmp_path)
    ran.expect()
    assert "checkpoint of step 2 holds no state of mismatch.lr" in ran.stderr


def test_a_skipped_float16_step_does_not_advance_the_rule(run: Run, dense: Path, tmp_path: Path) -> None:
    run(scenarios.skipped, model=dense, out=tmp_path).expect()


@pytest.mark.parametrize("kind", ["trainer", "callback"])
def test_a_training_that_begins_anew_begins_with_the_whole_rate(
    run: Run, dense: Path, tmp_path: Path, kind: str
) -> None:
    run(scenarios.again, model=dense, out=tmp_path, kind=kind).expect()


def test_the_whole_batch_of_a_step_leads_it(run: Run, dense: Path, tmp_path: Path) -> None:
    run(scenarios.whole_batch, model=dense, out=tmp_path).expect()
