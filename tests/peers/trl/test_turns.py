"""Completions of several turns in the real TRL with vLLM: the gap and the routes with every section on, and planted faults."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.peers.scenarios import Run, named
from tests.peers.trl.ranks import launch

scenarios = named("tests.peers.trl.scenarios_turns")
ranks = named("tests.peers.trl.scenarios_turns_ranks")

pytestmark = pytest.mark.engine


@pytest.mark.numeric
def test_three_turns_with_every_section_agree_and_what_goes_wrong_between_them_is_named(
    run: Run, tmp_path: Path
) -> None:
    run(scenarios.tools, out=tmp_path).expect()


def test_a_config_that_does_not_act_measures_turns_and_tells_what_goes_wrong_between_them(
    run: Run, tmp_path: Path
) -> None:
    run(scenarios.measured, out=tmp_path).expect()


@pytest.mark.numeric
def test_a_function_that_asks_the_engine_agrees_and_what_it_does_wrong_is_named(run: Run, tmp_path: Path) -> None:
    run(scenarios.functions, out=tmp_path).expect()


@pytest.mark.nightly
def test_ranks_of_a_sharded_model_wait_for_no_turn_of_each_other(run: Run, tmp_path: Path) -> None:
    launch(run, "fsdp2", ranks.unequal, tmp_path, limit=200).expect()
