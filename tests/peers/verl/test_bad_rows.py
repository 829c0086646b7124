"""A bad row has no part in any of verl's losses, and the gradients of all other rows stay bit for bit."""

from __future__ import annotations

import pytest

from tests.peers.scenarios import Run, Scenario, named

scenarios = named("tests.peers.verl.in_process.scenarios_bad_rows")

pytestmark = pytest.mark.numeric


@pytest.mark.parametrize("scenario", [scenarios.losses, scenarios.terms], ids=["losses", "terms"])
def test_other_rows_keep_their_gradients(run: Run, scenario: Scenario) -> None:
    run(scenario).expect()


def test_driver_and_workers_tell_each_other_which_rows_are_bad(run: Run) -> None:
    run(scenarios.marked).expect()


@pytest.mark.parametrize("scenario", [scenarios.of_versions, scenarios.lost], ids=["versions", "routes"])
def test_a_row_of_other_weights_or_without_routes_is_bad_and_a_batch_of_them_is_an_error(
    run: Run, scenario: Scenario
) -> None:
    run(scenario).expect()
