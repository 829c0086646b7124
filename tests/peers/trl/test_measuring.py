"""Configs that do not act, with the real TRL and vLLM: the run is stock's to the last bit, and every failed check is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.peers.scenarios import Run, named

scenarios = named("tests.peers.trl.scenarios_measuring")

pytestmark = pytest.mark.engine


@pytest.mark.numeric
@pytest.mark.parametrize("rloo", [False, True])
def test_an_empty_config_measures_as_attach_does_and_sections_under_observe_are_left_out(
    run: Run, moe: Path, tmp_path: Path, rloo: bool
) -> None:
    run(scenarios.measured, model=moe, out=tmp_path, rloo=rloo).expect()


@pytest.mark.numeric
def test_four_faults_are_told_and_change_nothing(run: Run, dense: Path, tmp_path: Path) -> None:
    run(scenarios.four_faults, model=dense, out=tmp_path).expect()


@pytest.mark.numeric
def test_a_resumed_run_goes_on_with_its_state_or_says_why_not(run: Run, dense: Path, tmp_path: Path) -> None:
    run(scenarios.resumed, model=dense, out=tmp_path).expect()


def test_neither_an_engine_that_fails_at_its_probes_nor_a_mistake_of_ours_ends_the_run(
    run: Run, dense: Path, tmp_path: Path
) -> None:
    run(scenarios.errors, model=dense, out=tmp_path).expect()


@pytest.mark.numeric
def test_a_callback_that_does_not_act_leaves_rate_and_run_alone(run: Run, dense: Path, tmp_path: Path) -> None:
    run(scenarios.callback, model=dense, out=tmp_path).expect()
