"""Weight updates: a server that does not answer says nothing, servers come and go, and a wrong one is found by its own answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.peers.scenarios import Run, Scenario, named

if TYPE_CHECKING:
    from tests.peers.verl.in_process import scenarios_weights as scenarios
else:
    scenarios = named("tests.peers.verl.in_process.scenarios_weights")


@pytest.mark.parametrize(
    "scenario",
    [
        scenarios.too_slow, scenarios.with_priorities, scenarios.in_flight, scenarios.one_silent, scenarios.elastic,
        scenarios.parted, scenarios.followed,
    ],
    ids=lambda scenario: scenario.__name__,
)  # fmt: skip
def test_updates_are_judged_by_those_who_answer(run: Run, scenario: Scenario) -> None:
    run(scenario).expect()


def test_probes_come_first_where_the_engine_has_priorities(run: Run) -> None:
    assert run(scenarios.asked_first).expect() == [[-(1 << 20)] * 2, [None] * 2]
