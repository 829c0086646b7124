"""What an engine may deliver, and what is refused: each fault with its own message."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mismatch_ext.errors import RoutingError
from mismatch_ext.routing import RoutingTrace
from tests.unit.test_routing_trace import routes

LAYERS = (1, 3)
MODEL: dict[str, Any] = {"num_experts": 8, "layers": LAYERS, "top_k": 3}


def ingest(array: Any, **changes: Any) -> RoutingTrace:
    """Ingest as request r7: 6 tokens, policy version 4."""
    return RoutingTrace.ingest(array, **({**MODEL, "tokens": 6, "version": 4, "request": "r7"} | changes))


@pytest.mark.parametrize("kind", ["uint8", "int16", "uint32", "int64"])
def test_every_integer_dtype_gives_the_same_trace(kind: str) -> None:
    ids = routes(5).numpy().astype(kind)
    for array in (ids, torch.from_numpy(ids), ids.tolist()):
        found = ingest(array)
        assert found.experts.dtype == torch.uint8 and found.layer(3).tolist() == ids[:, 1].tolist()
        assert (found.start, found.versions, found.layers) == (0, ((0, 4),), LAYERS)


def test_the_engine_may_go_on_using_its_buffer() -> None:
    buffer = routes(5).numpy().astype(np.uint8)
    found = ingest(buffer)
    before = found.experts.clone()
    buffer[:] = 7
    assert torch.equal(found.experts, before)


def test_dense_layers_are_dropped_from_the_engines_axis() -> None:
    every = np.zeros((5, 6, 3), np.int32)  # six decoder layers, of which 1 and 3 have experts
    every[:, 1], every[:, 3] = routes(5)[:, 0], routes(5)[:, 1]
    assert torch.equal(ingest(every).experts.long(), routes(5))


def test_a_full_forward_pass_has_a_row_more_than_an_engine() -> None:
    assert ingest(routes(5)).rows == 5 and ingest(routes(6)).rows == 6
    assert ingest(routes(2), start=3).start == 3  # positions 3 and 4 of 6 tokens
    with pytest.raises(RoutingError, match="6 rows for 6 tokens, 1 surplus; allowed: 5 .the engine"):
        ingest(routes(6), last_row=False)
    with pytest.raises(RoutingError, match="5 rows for 6 tokens, 1 missing; allowed: 6 "):
        ingest(routes(5), last_row=True)


@pytest.mark.parametrize(("rows", "experts", "refused"), [(63, 8, False), (64, 8, True), (500, 1, False)])
def test_a_long_sequence_with_one_expert_per_token_is_not_all_expert_0(rows: int, experts: int, refused: bool) -> None:
    ids = torch.zeros(rows, 2, 1, dtype=torch.int64)
    ids[rows // 2, 0] = min(1, experts - 1)
    changes = {"top_k": 1, "num_experts": experts, "tokens": rows + 1}
    with (
        pytest.raises(RoutingError, match=r"request r7, layer 3: all expert ids are zero") if refused else nullcontext()
    ):
        ingest(ids, **changes)


def _set(where: tuple[Any, ...], value: Any) -> torch.Tensor:
    ids = routes(5)
    ids[where] = torch.as_tensor(value)
    return ids


SHIFTED = torch.cat([routes(5), torch.zeros(5, 2, 3, dtype=torch.int64)], 1)
FAULTS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "swapped layers": (routes(5), {"layers": (3, 1)}, "not ascending"),
    "shifted layers": (SHIFTED, {}, "layer 0: .*routes here"),
    "all zeros": (_set((slice(None), 1), 0), {}, "layer 3: all expert ids are zero"),
    "id out of range": (_set((3, 0, 2), 8), {}, "row 3, layer 1: expert id 8 .*0 to 7"),
    "id that would wrap around": (_set((3, 0, 2), 257), {}, "row 3, layer 1: expert id 257"),
    "other experts per token": (routes(5, top_k=2), {}, "2 experts per token"),
    "too few layers": (routes(5, layers=3), {}, "another model"),
    "nothing": (None, {}, "there is no routing"),
    "start beyond the sequence": (routes(0), {"start": 7}, "start=7"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_has_its_own_message(name: str) -> None:
    array, changes, words = FAULTS[name]
    with pytest.raises(RoutingError, match=f"^request r7.*{words}"):
        ingest(array, **changes)


@given(
    rows=st.integers(1, 40), top_k=st.integers(2, 12), experts=st.sampled_from([16, 300]), seed=st.integers(0, 99),
    repeated=st.lists(st.tuples(st.integers(0, 39), st.integers(0, 11), st.integers(1, 11)), max_size=3),
)  # fmt: skip
def test_duplicates_are_found_wherever_they_are(
    rows: int, top_k: int, experts: int, seed: int, repeated: list[tuple[int, int, int]]
) -> None:
    ids = routes(rows, 1, top_k, 16, seed)
    for row, slot, distance in repeated:
        ids[row % rows, 0, (slot + distance) % top_k] = ids[row % rows, 0, slot % top_k]
    # Oracle: a set per row.
    first = next((i for i, row in enumerate(ids[:, 0].tolist()) if len(set(row)) < top_k), None)
    changes = {"layers": (3,), "num_experts": experts, "top_k": top_k, "tokens": rows}
    with patch("mismatch_ext.routing.ingest.BLOCK", 16):
        if first is None:
            assert torch.equal(ingest(ids, **changes).experts.long(), ids)
        else:
            with pytest.raises(RoutingError, match=f"row {first}, layer 3: duplicate|all expert ids are zero"):
                ingest(ids, **changes)
