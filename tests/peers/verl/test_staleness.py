"""verl's client notes which weights and experts sampled each token of an answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.peers.scenarios import Run, named

if TYPE_CHECKING:
    from tests.peers.verl.in_process import scenarios_staleness as scenarios
else:
    scenarios = named("tests.peers.verl.in_process.scenarios_staleness")


def test_the_client_notes_each_request_of_an_answer_over_turns(run: Run) -> None:
    found = run(scenarios.resumed).expect()
    assert found["tokens"] == [[1, 2, 3], [4, 5]] and found["ends"] == [4, 5]
    # Version, and the tokens in front; a request that was interrupted before its first token sampled none.
    assert found["noted"] == [[4, 3], [5, 5], [5, 5], [6, 8], [8, 11]] and found["shared"]
    # A token keeps the experts that it was sampled with, up to where a turn was given other tokens. They travel by themselves.
    assert found["routes"][0] == [4, 4, 4, 4, 5]
    assert found["routes"][1] == [4, 4, 4, 4, 5, 6, 6, 6, 6]
    assert found["routes"][2] == [4, 4, 4, 4, 5, 6, 6, 6, 6, 8, 8] and found["travels_as"] == "list"
    (told,) = found["told"]
    assert (
        found["other"] == "object" and "the client of verl's rollout servers has class object, not verl's own" in told
    )
    # R3 replays nothing of which nobody says the tokens.
    assert found["refused"].startswith(
        "ConfigError: mismatch.routing.mode=R3, but the client of verl's rollout servers has class"
    )
