"""Routing record and replay in the real megatron-core, on a CPU: one rank, and two over gloo.

The wrongs that megatron's own RouterReplay does without an error, each of which one test here has as its subject: backward passes
in another order than the forwards, forward-only replays before training, a list of targets that grows, missing rows, rows of
zeros or duplicates, rows in batch-first order, and the fused router.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.peers.scenarios import Run, named

if TYPE_CHECKING:
    from tests.peers.megatron import scenarios_ranks as on_two_ranks
    from tests.peers.megatron import scenarios_routing as scenarios
    from tests.peers.megatron import scenarios_routing_refusals as refused
else:
    scenarios = named("tests.peers.megatron.scenarios_routing")
    refused = named("tests.peers.megatron.scenarios_routing_refusals")
    on_two_ranks = named("tests.peers.megatron.scenarios_ranks")


pytestmark = pytest.mark.engine
MEGATRON = ["none", "uniform", "uniform2", "block", "moe"]
TORCH = [
    "torch-reentrant",
    "torch-saved",
    "torch-whole-reentrant",
    "torch-whole-saved",
    "torch-whole-reentrant+uniform",
]
FORMULAS = ["softmax", "pre-softmax", "sigmoid-bias-groups", "softmax-groups"]


@pytest.fixture(scope="module")
def fits(run: Run) -> dict[str, str]:
    """Return what became of traces that fit or don't."""
    return run(refused.rows_and_ids).expect()


@pytest.fixture(scope="module")
def refusals(run: Run) -> dict[str, str]:
    """Return what became of models and calls that cannot be replayed."""
    return run(refused.refusals).expect()


def test_other_tokens_are_routed_by_the_model_or_refused(run: Run) -> None:
    for kind, found in run(scenarios.other_tokens, kinds=["none", "uniform", "moe", "torch-saved"]).expect().items():
        for name in ("altered", "rows", "seeing", "packed", "replayed", "obeyed"):
            assert found[name], (kind, name)
        assert found["counts"] == [1, 4], kind
        assert "over other tokens than its routes: 1 of 20 rows differ, the first is row 2" in found["refused"], found
        assert "none of the 1 forward passes is the one" in found["only"] and "does not know" in found["unknown"], found


@pytest.mark.parametrize(
    "dispatchers, formulas, kinds",
    [(["alltoall"], FORMULAS, MEGATRON + TORCH), (["allgather"], FORMULAS[:1], MEGATRON)],
    ids=["alltoall", "allgather"],
)
def test_own_routes_are_bitwise_and_others_are_selected(
    run: Run, dispatchers: list[str], formulas: list[str], kinds: list[str]
) -> None:
    results = run(scenarios.numerics, dispatchers=dispatchers, formulas=formulas, kinds=kinds).expect()
    assert len(results) == len(dispatchers) * len(formulas) * len(kinds)
    for name, found in results.items():
        assert found["record_is_no_op"] and found["trace_is_what_ran"], name
        assert found["own_is_bitwise"], name
        # Every call of every router, in the forward pass and in recomputation.
        assert found["other_is_selected"], name
        assert found["other_gradients_as_without_recompute"] and found["finite"], name
        assert found["other_matters"] > 0.1, name
        # Recomputation really ran the routers again (of two in four layers, for "block").
        last = name.split()[-1]
        again = {"none": [1], "block": [1, 2], "torch-whole-reentrant+uniform": [3]}.get(last, [2])
        assert found["runs_of_a_router"] == again, name


def test_router_gradients_are_finite_differences(run: Run) -> None:
    found = run(scenarios.differences).expect()
    assert set(found) == set(FORMULAS)
    for formula, errors in found.items():
        # Float32 leaves a relative error near 1e-3; a gate without gradient would be 1.
        assert len(errors) == 4 and max(errors.values()) < 1e-2, formula


def test_backward_passes_in_any_order(run: Run) -> None:
    kinds = ["none", "uniform", "block", "moe", "torch-reentrant", "torch-saved", "torch-whole-reentrant"]
    results = run(scenarios.interleaved, kinds=kinds).expect()
    assert list(results) == kinds
    for kind, found in results.items():
        # First in, first out; and the order in which megatron's own queue replays the other micro-batch's routes.
        assert found["ab"] == [True, True] and found["ba"] == [True, True], kind
        # Two sums of float32 (eps is 1.2e-7) in another order, where the two micro-batches' own gradients differ wholly.
        assert found["one_backward"] < 1e-4 and found["apart"] > 0.1, kind
        assert found["after_forward_only"], kind
        assert found["inside_next"] and found["inside_own"] and found["forwards"] == 1, kind
        assert found["native_stays_native"], kind


def test_nothing_is_left_behind(run: Run) -> None:
    for kind, found in run(scenarios.leaks, kinds=["none", "uniform", "moe", "torch-saved"]).expect().items():
        assert found["freed_after_backward"], kind
        # Recomputation needs the trace until the backward pass; without it nothing holds it.
        assert found["held_by_the_graph"] == (kind != "none"), kind
        assert "19 rows" in found["failure"], kind
        assert found["model_is_as_before"] and found["torch_is_as_before"], kind


@pytest.mark.parametrize(
    "case, error, words",
    [
        ("missing_row", "ReplayError", "19 rows, the forward pass 20 tokens (2 x 10"),
        ("surplus_row", "ReplayError", "21 rows, the forward pass 20 tokens"),
        ("one_sample", "ReplayError", "10 rows, the forward pass 20 tokens"),
        ("zeros", "RoutingError", "row 7, layer 2 of the routing trace is [0, 0]"),
        ("duplicate", "RoutingError", "row 7, layer 2 of the routing trace is [3, 3]"),
        ("out_of_range", "RoutingError", "row 7, layer 2 of the routing trace is [3, 8]"),
        ("mask_rows", "RoutingError", "mask is torch.bool (19,)"),
        ("mask_dtype", "RoutingError", "mask is torch.float32"),
        ("int16_part", "RoutingError", "torch.int16"),
        ("sentinel", "RoutingError", "expert id -1 is out of range"),
        ("ingest_all_zero_layer", "RoutingError", "layer 2: all expert ids are zero"),
        ("layers", "RoutingError", "MoE layers (0, 1, 2, 4), the model (0, 1, 2, 3)"),
        ("fewer_layers", "RoutingError", "MoE layers (0, 1, 2)"),
        ("experts", "RoutingError", "experts per layer 16, the model 8"),
        ("top_k", "RoutingError", "experts per token 1, the model 2"),
    ],
)
def test_traces_that_do_not_fit(fits: dict[str, str], case: str, error: str, words: str) -> None:
    assert fits[case].startswith(f"{error}: ") and words in fits[case]


@pytest.mark.parametrize("case", ["good", "bad_row_is_native", "ingest_wide_is_good"])
def test_traces_that_fit(fits: dict[str, str], case: str) -> None:
    assert fits[case].startswith("no error")


def test_rows_are_batch_first_and_masks_leave_rows_to_the_model(run: Run) -> None:
    found = run(scenarios.order).expect()
    # Each sample's routes, recorded alone, are the batch's rows one sample after the other: not megatron's own order.
    assert found["rows_are_batch_first"] and found["samples_differ"] and found["two_forwards_in_order"]
    assert found["masked"] and found["native_differs"] and found["finite"]
    # Three of padding, and each sample's last token.
    assert found["counts"] == [1, 20, 5, 5]
    assert found["packed"]


@pytest.mark.parametrize(
    "case, words",
    [
        ("fusion", "moe_router_fusion"),
        ("context_parallel", "context_parallel_size > 1"),
        ("force_balance", "moe_router_force_load_balancing"),
        ("capacity", "moe_expert_capacity_factor"),
        ("cuda_graph", "cuda_graph_impl='local'"),
        ("overlap", "overlap_moe_expert_parallel_comm"),
        ("sinkhorn", "sinkhorn"),
        ("dense", "the model is dense"),
        ("no_decoder", "Linear has 0 transformer blocks"),
        ("twice", "given twice"),
        ("same_layers", "without `vp_stage`"),
        ("layer_number", "layer, MoE layer and router say 2, 2 and 4"),
        ("stray_router", "extra (TopKRouter) is not the router of a decoder layer"),
        ("patched_router", "TopKRouter.routing was replaced"),
        ("native_active", "RouterReplay is active"),
        ("nested", "already being recorded or replayed"),
        ("no_forward", "nothing was replayed"),
        ("another_model", "nothing was replayed"),
        ("nothing_recorded", "at least one forward"),
        ("native_not_asked", "native=True"),
        ("skipped_layer", "layers [1] [0] times"),
        ("repeated_router", "layers [1] [2] times"),
        ("bypassed_topk", "asked for its experts 0 times"),
        ("outside_decoder", "outside a forward of its decoder block"),
        ("foreign_checkpoint", "decoder layer 1 runs inside a checkpoint"),
        ("foreign_checkpoint_whole", "the decoder block runs inside a checkpoint"),
    ],
)
def test_what_cannot_be_replayed_is_refused(refusals: dict[str, str], case: str, words: str) -> None:
    assert refusals[case].startswith("ReplayError: ") and words in refusals[case]


def test_megatrons_own_replay_is_not_asked(refusals: dict[str, str]) -> None:
    assert refusals["native_idle"] == "right: True"


def test_dense_and_predicting_layers_are_left_out(run: Run) -> None:
    found = run(scenarios.layers).expect()
    assert found["dense_skipped"] == found["recorded_layers"] == [1, 3] and found["dense_replayed"]
    assert found["mtp_routers"] == 1 and found["mtp_layers"] == [0, 1, 2, 3] and found["mtp_replayed"]


def test_load_counts_replayed_routes_and_the_auxiliary_loss_does_not(run: Run) -> None:
    found = run(scenarios.statistics).expect()
    assert found["loads"] == {"none": True, "uniform": True, "moe": True}
    # The first layer sees the same hidden states with and without replay, so its own top-k gives the same loss.
    native, replayed = found["auxiliary_loss"]
    assert native == replayed > 0


def test_two_ranks_share_tensors_and_experts(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "one.npz"
    assert run(scenarios.record, path=path).expect()["rows"] == 20
    kinds = ["none", "uniform", "moe"]
    results = run(on_two_ranks.parallel, timeout=180, kinds=kinds, trace=path).expect()
    assert set(results) == {"tensor=2 expert=1", "tensor=1 expert=2", "tensor=2 expert=2"}
    for arrangement, ranks in results.items():
        shared = "tensor=2" in arrangement
        assert [found["wide"] for found in ranks] == [True, True], arrangement
        for kind in kinds:
            first, second = (found[kind] for found in ranks)
            for found in (first, second):
                name = f"{arrangement} {kind}"
                # Under sequence parallelism a router sees half of the tokens; a trace has all of them.
                assert found["rows"] == (10 if shared else 20) and found["trace_rows"] == 20, name
                assert found["record_is_no_op"] and found["trace_is_what_ran"] and found["own_is_bitwise"], name
                assert found["other_is_selected"] and found["one_ranks_trace_is_selected"], name
                assert found["other_gradients_as_without_recompute"] and found["other_matters"], name
                assert found["later_first"], name
                assert "19 rows, the forward pass 20 tokens" in found["short"], name
            assert (first["digest"] == second["digest"]) == shared


def test_two_pipeline_stages(run: Run) -> None:
    kinds = ["none", "uniform", "moe"]
    results = run(on_two_ranks.pipeline, timeout=180, kinds=kinds).expect()
    for chunks, layers in (("chunks=1", ([0, 1], [2, 3])), ("chunks=2", ([0, 2], [1, 3]))):
        for found, own in zip(results[chunks], layers, strict=True):
            assert list(found) == kinds
            for kind, result in found.items():
                name = f"{chunks} {kind}"
                assert result["layers"] == result["recorded_layers"] == own, name
                assert result["model_layers"] == [0, 1, 2, 3], name
                assert result["own_is_bitwise"] and result["other_is_selected"] and result["other_matters"], name
                assert result["other_gradients_as_without_recompute"] and result["later_first"], name
    # Which micro-batch's routes each run of a router had. The first stage is one forward ahead of its recomputations.
    runs = [found["runs"] for found in results["schedule"]]
    assert runs[0] == {"0": [0, 1, 0, 2, 1, 3, 2, 3], "1": [0, 1, 0, 2, 1, 3, 2, 3]}
    assert runs[1] == {"2": [0, 0, 1, 1, 2, 2, 3, 3], "3": [0, 0, 1, 1, 2, 2, 3, 3]}
    for found in results["schedule"]:
        # Four sums of float32 in another order, against the largest gradient.
        assert found["error"] < 1e-4 * found["scale"] and found["scale"] > 0.1
    first, second = results["offsets"]
    assert (first["uneven"], second["uneven"]) == ([0], [1, 2, 3])
    assert (first["dense"], second["dense"]) == ([], [2, 3])
    for found in (first, second):
        assert found["dense_model"] == [2, 3] and found["dense_replayed"]
        assert found["whole"] == found["own"] == "accepted"
        assert found["others"].startswith("RoutingError: ") and found["deeper"].startswith("RoutingError: ")
