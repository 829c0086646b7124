"""Masks and routes of an agent loop's turns, which go into the batch with the tokens that they are of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.peers.scenarios import Run, named

if TYPE_CHECKING:
    from tests.peers.verl.in_process import scenarios_turns as scenarios
else:
    scenarios = named("tests.peers.verl.in_process.scenarios_turns")


def test_masks_go_with_the_tokens_that_they_are_of_or_it_is_said_why_not(run: Run) -> None:
    found = run(scenarios.masked).expect()
    # Three turns of the policy, and the tool's two tokens between them.
    assert found["nothing"] == [[0, 1], [0, 2], [], [], [0, 3], [0, 4], [], [], [0, 5]]
    assert "completion uid_0_0: the engine sent no sampling masks" in found["no masks"]
    assert "an answer of 2 tokens has sampling masks of 1" in found["fewer masks"]
    assert "no call of the engine has sampled its tokens" in found["another client"]


def test_routes_of_verls_own_loops_are_proven_and_those_of_other_tokens_are_not(run: Run) -> None:
    run(scenarios.routed).expect()


def test_tokens_that_no_request_has_sampled_are_found_in_rows_of_verls_own_loops(run: Run) -> None:
    run(scenarios.sampled).expect()


def test_verls_metrics_of_the_experts_load_are_those_without_digests(run: Run) -> None:
    run(scenarios.loads).expect()


def test_digests_of_a_conversation_that_grows(run: Run) -> None:
    run(scenarios.grown).expect()
