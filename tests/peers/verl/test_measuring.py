"""What verl's driver measures chunk by chunk is what it would measure of the whole batch, and errors name rollout and token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.peers.scenarios import Run, Scenario, named

if TYPE_CHECKING:
    from tests.peers.verl.in_process import scenarios_measuring as scenarios
else:
    scenarios = named("tests.peers.verl.in_process.scenarios_measuring")

pytestmark = pytest.mark.numeric


@pytest.mark.parametrize(
    "scenario",
    [
        scenarios.chunks, scenarios.of_a_sample, scenarios.unfit, scenarios.evidence, scenarios.by_version, scenarios.kl,
        scenarios.discarded, scenarios.grouping, scenarios.users_own_metrics,
    ],
    ids=lambda scenario: scenario.__name__,
)  # fmt: skip
def test_a_batch_is_measured_by_the_driver_as_it_is(run: Run, scenario: Scenario) -> None:
    run(scenario).expect()


def test_rows_are_held_against_what_the_engine_sampled_and_by_which_settings(run: Run) -> None:
    run(scenarios.as_sampled).expect()
