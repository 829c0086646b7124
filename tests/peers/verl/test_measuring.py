"""What verl's workers measure where the tokens lie is what one process measures that has all of them, and errors name the row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.peers.scenarios import Run, named

if TYPE_CHECKING:
    from tests.peers.verl.in_process import scenarios_measuring as scenarios
else:
    scenarios = named("tests.peers.verl.in_process.scenarios_measuring")

pytestmark = pytest.mark.numeric


def same(found: Any, expected: Any) -> bool:
    """Tell whether nested numbers are the same but for the order of sums in float64."""
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[name], value) for name, value in expected.items())
    if isinstance(expected, list):
        return len(found) == len(expected) and all(same(*pair) for pair in zip(found, expected, strict=True))
    return found == expected if expected is None else found == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_parts_in_any_order_are_the_whole(run: Run) -> None:
    found = run(scenarios.parts).expect()
    whole = found["whole"]
    assert whole["scalars"]["tokens"] == sum(found["tokens"]) and whole["scalars"]["k3_kl"] > 1e-6
    # Orders of 1, 2 and 4 parts.
    assert len(found["parts"]) == 1 + 2 + 24
    for part in found["parts"]:
        assert same({name: part[name] for name in whole}, whole)
        assert part["lengths"] == found["tokens"]
        # Tokens of a tool fill a response up, too: the second has 17 places, of which 13 are the policy's.
        assert part["truncated"] == [False, True, False, False, True, False]
        assert part["drawn"] == sum(found["tokens"]) and part["bytes"] < 16000


def test_values_that_are_no_logprobs_are_named_by_their_rollout(run: Run) -> None:
    found = run(scenarios.unfit).expect()
    said = "NonFiniteLogprobError: rollout {}: the engine reported log-probability {}; its logits overflowed"
    assert found["sampled"].startswith(said.format("prompt_5_0 of step 4, token 9", "nan"))
    assert found["infinite"].startswith(said.format("prompt_2_0 of step 4, token 0", "-inf"))
    assert found["a tool's"] == found["filled up"] == "nothing was refused"
    expected = "NonFiniteLogprobError: rollout prompt_6_0 of step 4, token 11: the trainer gives log-probability inf"
    assert found["trainer's"].startswith(expected)
    assert "the workers measured 4 of the 7 responses of step 4" in found["a rank is missing"]
    assert "response 1 of part 1 of the batch has 9 rollout_log_probs and 30 places" in found["short"]
    assert "calculate_log_probs=True" in found["absent"]


def test_prompts_are_handed_out_whole_and_once(run: Run) -> None:
    found = run(scenarios.spreading).expect()
    keys, groups = found["keys"], found["groups"]
    assert sorted(key for group in groups for key in group) == sorted(keys)
    # Four answers to the first prompt, of which one came late; a session of several outputs is in no group.
    assert len(groups[0]) == 4 and ["turns_0_0"] in groups and ["turns_0_1"] in groups and ["turns_1_0"] in groups
    for ranks, shares in found["ranks"].items():
        assert len(shares) == int(ranks)
        assert sorted(group for share in shares for group in share) == sorted(groups)
    assert [group for block in found["blocks"] for group in block] == groups
    sizes = [(len(block), sum(map(len, block))) for block in found["blocks"]]
    assert all(rows <= 64 or count == 1 for count, rows in sizes) and max(rows for _, rows in sizes) == 80
