"""verl's Megatron engine with the checks of its replay, around a real megatron-core model, on a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.peers.scenarios import Run, named

if TYPE_CHECKING:
    from tests.peers.verl import scenarios_megatron as scenarios
else:
    scenarios = named("tests.peers.verl.scenarios_megatron")


pytestmark = pytest.mark.engine

SECOND = "RoutingError: request 1 of rank 0's mini-batch (uid second)"
SAID = {
    "zeros": (SECOND, "routing has 0 rows, but verl replays 6"),
    "zero_tail": (SECOND, "routing has 4 rows, but verl replays 6"),
    "zero_row": (SECOND, "row 2, layer 1: duplicate expert ids [0, 0]"),
    "range": (SECOND, "row 2, layer 2: expert id 8 is out of range"),
    "short": (SECOND, "routing has 5 rows; allowed: 7 or 6 for 7 tokens"),
    "dense_layer": (SECOND, "layer 0: the engine recorded routes here"),
    "r2_zero_row": (SECOND, "routing has 6 rows, but verl replays 7"),
    "layers": ("RoutingError", "routing has 4 layers; allowed: 2, the model's MoE layers, or 3"),
    "none": ("RoutingError", "has no 'routed_experts'"),
    "no_flag": ("ReplayError", "enable_routing_replay=None"),
    "flag_off": ("ReplayError", "would route this update natively"),
    "not_built_for_it": ("ReplayError", "router_replay.mode='disabled'"),
    "left_out": ("ReplayError", "router of decoder layer 1, action None"),
    "replay_forward": ("ReplayError", "router of decoder layer 1, action 'replay_forward'"),
    "replay_backward": ("ReplayError", "router of decoder layer 1, action 'replay_backward'"),
    "bypassed": ("ReplayError", "routers of decoder layers [2] selected experts without verl's replay"),
    "rows": ("ReplayError", "the routes are (4, 2), the forward pass has 6 tokens of 2 experts"),
}


def test_good_batches_are_verls_own_bit_for_bit_and_what_would_not_be_replayed_is_refused(run: Run) -> None:
    # One scenario, whose imports no other shares.
    found = run(scenarios.everything, fresh=True).expect()
    assert found.keys() == SAID.keys()
    for name, (error, words) in SAID.items():
        assert found[name].startswith(error) and words in found[name], (name, found[name])
