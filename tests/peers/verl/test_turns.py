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
    assert "rollout r, token 1: at least 24 tokens were left" in found["unknown masks"]
    assert "an answer of 2 tokens has sampling masks of 1" in found["fewer masks"]
    assert "no call of the engine has sampled its tokens" in found["another client"]


def test_routes_of_verls_own_loops_are_proven_and_those_of_other_tokens_are_not(run: Run) -> None:
    found = run(scenarios.routed).expect()
    for name, own in found.items():
        case, top_k, turns = name.rsplit(" ", 2)
        assert own["shape"] == [own["tokens"], 3, int(top_k)], name
        if case in ("single", "tools", "glm", "resumed", "truncated"):
            assert own["missing"] == 0, name
        elif case in ("encoded again", "other context"):
            assert own["other"], name
        else:  # with one expert for a token, a lost row looks like expert 0
            assert own["missing"] > 0 and not own["other"], name
            # Of routes with too few rows nobody knows which ones are missing.
            assert (own["proven"] == 0) == (case == "rows missing"), name
        # A token has eight bytes more than its routes, whatever a template rewrites, and reward functions can write the rest.
        assert own["bytes"] == 8 * own["tokens"]
        assert own["extra"] < 300 + 20 * int(turns), own["extra"]


def test_tokens_that_no_request_has_sampled_are_found_in_rows_of_verls_own_loops(run: Run) -> None:
    found = run(scenarios.sampled).expect()
    assert {case: one["first"] for case, one in found.items()} == {
        **dict.fromkeys(("single", "tools", "glm", "resumed", "truncated")),
        # The third token of the answer is another; the second turn was asked without the first one's four tokens, and the
        # tool's two.
        "encoded again": 0,
        "other context": 6,
    }
    assert found["tools"]["requests"] == 3 and found["single"]["requests"] == 1
    assert all(one["settings"] in ([{"temperature": 1.0, "top_k": -1}], [{}]) for one in found.values())


def test_verls_metrics_of_the_experts_load_are_those_without_digests(run: Run) -> None:
    alone, carrying = run(scenarios.loads).expect()
    assert alone == carrying and len(alone) > 6


def test_digests_and_routes_of_a_conversation_that_grows(run: Run) -> None:
    grown = run(scenarios.grown).expect()
    assert len(grown) == 120 and all(grown)
    # The last turn's fourth token is another than the second's, so that it and all after it have the last turn's routes.
    assert run(scenarios.kept_routes).expect() == [[0] * 3, [0] * 3 + [1] * 2, [0] * 3 + [2] * 3]


def test_routes_are_not_copied_on_the_event_loop(run: Run) -> None:
    on_loop = run(scenarios.threads).expect()
    assert len(on_loop) == 4 and not any(on_loop)
