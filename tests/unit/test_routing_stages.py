"""How far replayed routes differ from the model's own, over the layers and ranks of a pipeline."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mismatch_ext.config import RoutingConfig
from mismatch_ext.routing import RoutingTrace
from mismatch_ext.routing.agreement import Agreement, agreement
from mismatch_ext.routing.stages import RouteAgreement, of_stages

LAYERS, EXPERTS = (1, 3), 8


def routes(seed: int, rows: int = 6, top_k: int = 2) -> Tensor:
    """Return random experts of two layers `[T, L, K]`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(rows, len(LAYERS), EXPERTS, generator=generator).topk(top_k).indices


def compared(mode: str, recorded: Tensor, native: Tensor, mask: Tensor | None) -> dict[str, float]:
    """Return what is measured of one pass over both layers."""
    found = RouteAgreement(RoutingConfig(mode=mode, measured=1.0), seed=1)  # type: ignore[arg-type]
    with found.batch():
        for at, layer in enumerate(LAYERS):
            found.compare(LAYERS, layer, recorded[:, at].to(torch.int16), native[:, at], mask, EXPERTS)
    return found.metrics()


def test_rows_without_a_route_are_left_out() -> None:
    recorded, native = routes(1), routes(2)
    mask = torch.tensor([True, True, False, True, False, False])
    kept = (
        RoutingTrace(parts=(ids[mask].to(torch.uint8),), layers=LAYERS, num_experts=EXPERTS)
        for ids in (recorded, native)
    )
    expected = agreement(*kept)
    metrics = compared("R3", recorded, native, mask)
    assert metrics.pop("routing/layer_1_set_mismatch") == expected.by_layer()[1]
    assert metrics.pop("routing/layer_3_set_mismatch") == expected.by_layer()[3]
    assert {**metrics, "routing/native_rows_frac": 0.0} == expected.metrics() and metrics[
        "routing/compared_tokens"
    ] == 3


def test_rows_of_zeros_are_padding_where_recorded_routes_have_no_mask() -> None:
    recorded = routes(1)
    recorded[4:] = 0
    assert compared("R2", recorded, routes(1), None)["routing/compared_tokens"] == 4
    assert compared("R2", recorded, routes(1), None)["routing/set_mismatch_frac"] == 0.0
    # With one expert per token expert 0 is a route, too.
    assert compared("R2", routes(1, top_k=1), routes(2, top_k=1), None) == {}


def test_what_a_failed_pass_has_left_is_not_taken_for_the_next() -> None:
    found, mask = RouteAgreement(RoutingConfig(mode="R3", measured=1.0), seed=1), torch.ones(6, dtype=torch.bool)
    with pytest.raises(ZeroDivisionError), found.batch():
        found.compare(LAYERS, 1, routes(1)[:, 0], routes(2)[:, 0], mask, EXPERTS)
        raise ZeroDivisionError
    with found.batch():
        for at, layer in enumerate(LAYERS):
            found.compare(LAYERS, layer, routes(3)[:, at], routes(3)[:, at], mask, EXPERTS)
    assert found.metrics()["routing/set_mismatch_frac"] == 0.0 and not found.active


def test_a_resumed_run_compares_the_same_batches() -> None:
    one, two = (RouteAgreement(RoutingConfig(mode="R3", measured=0.5), seed=seed) for seed in (1, 2))
    for _ in range(3):
        with one.batch():
            pass
    two.load_state_dict(one.state_dict())
    drawn: list[list[bool]] = [[], []]
    for _ in range(16):
        for found, draws in zip((one, two), drawn, strict=True):
            with found.batch():
                draws.append(found.active)
    assert drawn[0] == drawn[1] and {*drawn[0]} == {True, False}


def test_the_stages_of_a_pipeline_have_seen_the_same_tokens() -> None:
    first = Agreement(layers=(0, 1), tokens=10, set_mismatches=(1, 2), order_agreements=(9, 8), token_mismatches=3)
    second = Agreement(layers=(2,), tokens=10, set_mismatches=(6,), order_agreements=(4,), token_mismatches=6)
    found = of_stages({(2,): second, (0, 1): first})
    assert found["routing/compared_tokens"] == 10 and found["routing/layer_set_mismatch_max"] == 0.6
    assert found["routing/set_mismatch_frac"] == pytest.approx(9 / 30)
    assert [found[f"routing/layer_{layer}_set_mismatch"] for layer in range(3)] == [0.1, 0.2, 0.6]
    # How many tokens differ in any layer no stage knows.
    assert "routing/token_mismatch_frac" not in found and "routing/token_mismatch_frac" in of_stages({(0, 1): first})
    assert of_stages({}) == {}
