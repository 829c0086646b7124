"""A bad row has no part in any of verl's losses, and the gradients of all other rows stay bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.peers.scenarios import Run, named

if TYPE_CHECKING:
    from tests.peers.verl.in_process import scenarios_bad_rows as scenarios
else:
    scenarios = named("tests.peers.verl.in_process.scenarios_bad_rows")

pytestmark = pytest.mark.numeric


def test_other_rows_keep_their_gradients_in_each_of_verls_losses(run: Run) -> None:
    found = run(scenarios.losses).expect()
    assert len(found) == 11 * 5 * 3
    for case, seen in found.items():
        assert seen["before"] > 0 and seen["finite"], case
        # clip_cov chooses among tokens by their ratios, which nobody knows where the old log-probability is not finite.
        assert seen["others"] or (case.startswith("clip_cov") and "old_log_probs" in case), case
        assert seen["row"] == 0, case


def test_other_rows_keep_their_gradients_of_kl_and_entropy(run: Run) -> None:
    found = run(scenarios.terms).expect()
    assert len(found) == 5 * 2 * 2
    for case, seen in found.items():
        assert seen["finite"] and seen["others"], case
        assert (seen["row"], seen["entropy"]) == (0, 0), case


def test_the_mean_of_normalized_weights_is_that_of_good_rows(run: Run) -> None:
    for level, found in run(scenarios.normalized).expect().items():
        for weights, without, verls in zip(found["found"], found["without"], found["verl's"], strict=True):
            assert weights == pytest.approx(without, rel=1e-6), level
            assert weights != pytest.approx(verls, rel=1e-2), level


def test_driver_and_workers_tell_each_other_which_rows_are_bad(run: Run) -> None:
    found = run(scenarios.marked).expect()
    ((reason, message),) = found["bad"]
    assert reason == "routes" and message.startswith("rollout prompt_2_0 of step 1: its routes are missing, malformed")
    assert found["marked"] == [False, False, True, False] and found["unmarked"] == [False] * 4
    assert found["kl"]


def test_a_row_of_other_weights_is_bad_and_a_batch_of_them_is_an_error(run: Run) -> None:
    found = run(scenarios.of_versions).expect()
    nothing = "nothing was refused"
    assert {name: case["error"] for name, case in found.items() if name != "all"} == dict.fromkeys(
        ("one", "unknown", "older", "ahead"), nothing
    )
    for name, row in (("one", 1), ("unknown", 2), ("ahead", 1)):
        ((reason, message),) = found[name]["bad"]
        assert reason == "weight_version" and message.startswith(f"rollout prompt_{row}_0: ")
    assert found["older"]["bad"] == [] == found["all"]["bad"]
    assert found["all"]["error"].startswith("RecordError: ") and "version 3" in found["all"]["error"]


def test_a_row_without_routes_is_bad_and_the_others_keep_theirs(run: Run) -> None:
    found = run(scenarios.lost).expect()
    for name in ("one", "measuring"):
        ((reason, message),) = found[name]["bad"]
        assert reason == "routes" and message.startswith("rollout prompt_1_0 of step 1 came without routing")
    assert found["one"]["put"] == [[7, 3, 4], "torch.int16", 0] and found["measuring"]["put"] is None
    assert found["all"]["error"].startswith("RoutingError: all 4 rollouts of step 1 came without routing")
