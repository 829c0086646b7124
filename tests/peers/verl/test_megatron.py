"""verl's Megatron engine with the checks of its replay, around a real megatron-core model, on a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.peers.scenarios import Run, named

if TYPE_CHECKING:
    from tests.peers.verl import scenarios_megatron as scenarios
else:
    scenarios = named("tests.peers.verl.scenarios_megatron")


pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def ran(run: Run) -> dict[str, Any]:
    # One scenario, whose imports no other shares.
    return run(scenarios.everything, fresh=True).expect()


@pytest.mark.parametrize(
    "case",
    [
        "no_target_is_native",
        "empty_queue_is_native",
        "left_out_is_native",
        "zeros_are_expert_0",
        "replay_obeys",
        "replay_matters",
    ],
)
def test_verl_alone_replays_and_goes_native_without_an_error(ran: dict[str, Any], case: str) -> None:
    assert ran["stock"][case] is True


@pytest.mark.parametrize("mode", ["R3", "R2"])
def test_other_tokens_are_routed_by_the_model_and_never_trained_on(ran: dict[str, Any], mode: str) -> None:
    found = ran["other"][mode]
    assert "its token ids are others than those that its routes were recorded of (1 of 3 samples)" in found["update"]
    assert found["scored_natively"] and found["scored_others"] == 1


def test_verl_alone_drops_tokens_that_have_no_row(ran: dict[str, Any]) -> None:
    # The sample has 7 tokens, of which 2 lost their rows: no expert sees them.
    assert ran["stock"]["short_rows_are_dropped"] == [5, 5]


@pytest.mark.parametrize(
    "case",
    [
        "r3",
        "without_last_row",
        "moe_layers_alone",
        "reference_is_native",
        "others_are_replayed",
        "filler_is_native",
        "update_none",
        "update_moe",
        "update_uniform",
        "update_obeys",
        "r2",
        "after_failure",
    ],
)
def test_good_batches_are_verls_own_bit_for_bit(ran: dict[str, Any], case: str) -> None:
    assert ran["checked"][case] is True


@pytest.mark.parametrize(
    "case, error, words",
    [
        ("zeros", "RoutingError", "routing has 0 rows, but verl replays 6"),
        ("zero_tail", "RoutingError", "routing has 4 rows, but verl replays 6"),
        ("zero_row", "RoutingError", "row 2, layer 1: duplicate expert ids [0, 0]"),
        ("duplicate", "RoutingError", "row 2, layer 1: duplicate expert ids [3, 3]"),
        ("range", "RoutingError", "row 2, layer 2: expert id 8 is out of range"),
        ("short", "RoutingError", "routing has 5 rows; allowed: 7 or 6 for 7 tokens"),
        ("long", "RoutingError", "routing has 8 rows; allowed: 7 or 6 for 7 tokens"),
        ("dense_layer", "RoutingError", "layer 0: the engine recorded routes here"),
        ("r2_short", "RoutingError", "routing has 5 rows; allowed: 7 for 7 tokens"),
        ("r2_zero_row", "RoutingError", "routing has 6 rows, but verl replays 7"),
    ],
)
def test_bad_routes_are_refused_by_their_sample(ran: dict[str, Any], case: str, error: str, words: str) -> None:
    found = ran["checked"]["faults"][case]
    assert found.startswith(f"{error}: request 1 of rank 0's mini-batch (uid second)") and words in found


@pytest.mark.parametrize(
    "case, error, words",
    [
        ("layers", "RoutingError", "uid first): routing has 4 layers; allowed: 2, the model's MoE layers, or 3"),
        ("none", "RoutingError", "has no 'routed_experts'"),
        ("no_flag", "ReplayError", "enable_routing_replay=None"),
        ("flag_off", "ReplayError", "would route this update natively"),
        ("not_built_for_it", "ReplayError", "router_replay.mode='disabled'"),
        ("left_out", "ReplayError", "router of decoder layer 1, action None"),
        ("replay_forward", "ReplayError", "router of decoder layer 1, action 'replay_forward'"),
        ("replay_backward", "ReplayError", "router of decoder layer 1, action 'replay_backward'"),
        ("bypassed", "ReplayError", "routers of decoder layers [2] selected experts without verl's replay"),
        ("rows", "ReplayError", "the routes are (4, 2), the forward pass has 6 tokens of 2 experts"),
    ],
)
def test_what_would_not_be_replayed_is_refused(ran: dict[str, Any], case: str, error: str, words: str) -> None:
    found = ran["checked"]["faults"][case]
    assert found.startswith(f"{error}: ") and words in found


def test_a_batch_that_fails_leaves_no_routes_behind(ran: dict[str, Any]) -> None:
    # verl leaves the first sample's, to be replayed in the next batch's backward pass.
    assert ran["stock"]["left_behind"] == [[1, "replay_backward"], [1, "replay_backward"]]
    assert ran["checked"]["left_behind"] == [[0, None], [0, None]]


def test_the_report_says_what_runs(ran: dict[str, Any]) -> None:
    names = ["verl/megatron_closed_topk"]
    report = ran["checked"]["report"]
    assert [patch["name"] for patch in report["patches"]] == names
    assert ran["checked"]["patched"] == [[], names, names]  # nothing is patched without routing, and nothing twice
    assert (report["strategy"], report["routing"]) == ("megatron", "R3")
    assert report["trainer"]["parameter_dtypes"] == {"float32": ran["checked"]["parameters"]}
    assert report["trainer"]["scaler"] is report["trainer"]["autocast_dtype"] is None


def test_our_loss_runs_in_verls_megatron_engine(ran: dict[str, Any]) -> None:
    plain, kl = ran["losses"]["plain"], ran["losses"]["kl"]
    assert "kl_loss" in kl["metrics"] and "kl_loss" not in plain["metrics"]
    added = ran["losses"]["added"]  # half of what verl's own metric says of the term
    assert added > 0.01
    assert kl["loss"] - plain["loss"] == pytest.approx(added, rel=1e-4)
