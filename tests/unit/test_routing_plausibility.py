"""Recorded routes that cannot be this model's are refused, although each id in them is valid."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mismatch_ext.errors import RoutingError
from mismatch_ext.routing import RoutingTrace, check_plausible, expert_overlap

LAYERS = (1, 3, 4, 7)


def trace(ids: Tensor, layers: tuple[int, ...] = LAYERS, experts: int = 16) -> RoutingTrace:
    """Return a trace of given experts `[R, L, K]`."""
    return RoutingTrace(parts=(ids.to(torch.uint8),), layers=layers, num_experts=experts)


def routes(rows: int = 600, layers: int = 4, experts: int = 16, top_k: int = 4) -> Tensor:
    """Return random distinct experts `[R, L, K]`."""
    scores = torch.rand(rows, layers, experts, generator=torch.Generator().manual_seed(0))
    return scores.topk(top_k, -1).indices


def test_overlap_is_the_mean_size_of_the_intersection() -> None:
    recorded = torch.tensor([[[0, 1], [2, 3]], [[4, 5], [6, 7]]])
    native = torch.tensor([[[1, 0], [2, 9]], [[4, 6], [6, 7]]])
    # Layer 0: rows share 2 and 1 of 2; layer 1: 1 and 2. Recorded layer 0 with native layer 1: none; 1 with 0: row 2 shares 6.
    found = expert_overlap(trace(recorded, (0, 1)), trace(native, (0, 1)))
    assert found.tolist() == [[0.75, 0.0], [0.25, 0.75]]


def test_a_few_flips_are_numerics() -> None:
    flipped = routes()
    flipped[::8, :, -1] = routes()[::8].add(1).remainder(16)[..., 0]  # one expert in 8 rows, as bf16 does and far more
    own = check_plausible(trace(flipped), trace(routes()))
    assert 0.9 < float(own.min()) < 1.0


def test_routes_of_other_tokens_are_refused() -> None:
    with pytest.raises(RoutingError, match=r"chance is 25%, allowed is 62% or more\. No other layer fits"):
        check_plausible(trace(routes().flip(0)), trace(routes()))


@pytest.mark.parametrize("shift, word", [(1, "before"), (-1, "after")])
def test_shifted_rows_are_refused_where_neighbours_are_alike(shift: int, word: str) -> None:
    # Blocks of four tokens share all experts but one: a neighbour's routes are far above chance, and above the limit.
    alike = routes(150).repeat_interleave(4, 0)
    alike[..., -1] = torch.arange(600)[:, None] % 8 + 16
    # Of tokens that are nothing alike too.
    with pytest.raises(RoutingError, match=f"100% with that for the token {word}: rows are shifted by one"):
        check_plausible(trace(routes().roll(shift, 0)), trace(routes()))
    shifted, native = trace(alike.roll(shift, 0), experts=24), trace(alike, experts=24)
    with pytest.raises(RoutingError, match=f"100% with that for the token {word}: rows are shifted by one"):
        check_plausible(shifted, native)
    assert check_plausible(native, native).tolist() == [1.0] * 4


def test_the_first_wrong_layer_is_named_whatever_is_wrong_above() -> None:
    # What a model chooses above a layer that replayed wrong experts is its own no longer.
    native = routes()
    native[:, 2:] = routes().roll(7, 0)[:, 2:]
    with pytest.raises(RoutingError, match=r"layer 3 of .* trace's layer 7 shares 100% with it: layers are swapped"):
        check_plausible(trace(routes()[:, [0, 3, 2, 1]]), trace(native))


def test_nothing_to_compare_is_refused() -> None:
    with pytest.raises(RoutingError, match="no row has a recorded route"):
        check_plausible(trace(routes()), trace(routes()), torch.zeros(600, dtype=torch.bool))
