"""What an engine may deliver, and what is refused: each fault with its own message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


@pytest.mark.parametrize("kind", ["uint8", "int8", "uint16", "int16", "int32", "uint32", "int64", "uint64"])
@pytest.mark.parametrize("experts", [8, 300])
def test_every_integer_dtype_gives_the_same_trace(kind: str, experts: int) -> None:
    ids = routes(5, experts=min(experts, 8)).numpy().astype(kind)
    for array in (ids, torch.from_numpy(ids), ids.tolist()):
        found = ingest(array, num_experts=experts)
        assert found.experts.dtype == (torch.uint8 if experts == 8 else torch.uint16)
        assert found.layer(3).tolist() == ids[:, 1].tolist()
        assert (found.start, found.versions, found.layers) == (0, ((0, 4),), LAYERS)


def test_the_engine_may_go_on_using_its_buffer() -> None:
    buffer = routes(5).numpy().astype(np.uint8)
    found = ingest(buffer)
    before = found.experts.clone()
    buffer[:] = 7
    assert torch.equal(found.experts, before)
    frozen = routes(5).numpy().astype(np.uint8)
    frozen.flags.writeable = False  # as vLLM's buffers may be; must not warn either
    assert torch.equal(ingest(frozen).experts, before)


def test_dense_layers_are_dropped_from_the_engines_axis() -> None:
    every = np.zeros((5, 6, 3), np.int32)  # six decoder layers, of which 1 and 3 have experts
    every[:, 1], every[:, 3] = routes(5)[:, 0], routes(5)[:, 1]
    assert torch.equal(ingest(every).experts.long(), routes(5))


def test_a_full_forward_pass_has_a_row_more_than_an_engine() -> None:
    assert ingest(routes(5)).rows == 5 and ingest(routes(6)).rows == 6
    assert ingest(routes(5), last_row=False).rows == 5 and ingest(routes(6), last_row=True).rows == 6
    assert ingest(routes(2), start=3).start == 3  # positions 3 and 4 of 6 tokens
    with pytest.raises(RoutingError, match="6 rows for 6 tokens, 1 surplus; allowed: 5 .the engine"):
        ingest(routes(6), last_row=False)
    with pytest.raises(RoutingError, match="5 rows for 6 tokens, 1 missing; allowed: 6 "):
        ingest(routes(5), last_row=True)


@pytest.mark.parametrize(
    ("rows", "experts", "refused"), [(63, 8, False), (64, 8, True), (64, 2, True), (500, 1, False)]
)
def test_a_long_sequence_with_one_expert_per_token_is_not_all_expert_0(rows: int, experts: int, refused: bool) -> None:
    ids = torch.zeros(rows, 2, 1, dtype=torch.int64)
    ids[rows // 2, 0] = min(1, experts - 1)
    changes = {"top_k": 1, "num_experts": experts, "tokens": rows + 1}
    if not refused:
        assert ingest(ids, **changes).rows == rows
        return
    with pytest.raises(RoutingError, match=r"request r7, layer 3: all expert ids are zero"):
        ingest(ids, **changes)
    ids[-1, 1] = 1
    assert ingest(ids, **changes).rows == rows


def _set(where: tuple[Any, ...], value: Any) -> Callable[[], Any]:
    def build() -> Any:
        ids = routes(5)
        ids[where] = torch.as_tensor(value)
        return ids

    return build


FAULTS: dict[str, tuple[Callable[[], Any], dict[str, Any], list[str]]] = {
    "missing row": (lambda: routes(4), {}, ["4 rows for 6 tokens, 1 missing", "5 (", "6 ("]),
    "extra row": (lambda: routes(7), {}, ["7 rows for 6 tokens, 1 surplus"]),
    "swapped layers": (lambda: routes(5), {"layers": (3, 1)}, ["layers (3, 1)", "not ascending"]),
    "shifted layers": (
        lambda: torch.cat([routes(5), torch.zeros(5, 2, 3, dtype=torch.int64)], 1), {}, ["layer 0", "(1, 3)", "routes here"],
    ),
    "all zeros": (_set((slice(None), 1), 0), {}, ["layer 3", "all expert ids are zero"]),
    "duplicate ids": (_set((2, 1), [5, 2, 5]), {}, ["row 2, layer 3", "duplicate expert ids [5, 2, 5]"]),
    "id out of range": (_set((3, 0, 2), 8), {}, ["row 3, layer 1", "expert id 8", "0 to 7"]),
    "id out of range in the engine's bytes": (
        lambda: _set((3, 0, 2), 200)().to(torch.uint8), {}, ["row 3, layer 1", "expert id 200", "0 to 7"],
    ),
    "id that would wrap around": (_set((3, 0, 2), 257), {}, ["row 3, layer 1", "expert id 257", "0 to 7"]),
    "negative id": (_set((0, 1, 0), -1), {}, ["row 0, layer 3", "expert id -1", "0 to 7"]),
    "fewer experts than recorded": (lambda: routes(5, experts=64), {"num_experts": 16}, ["out of range", "0 to 15"]),
    "other experts per token": (lambda: routes(5, top_k=2), {}, ["2 experts per token", "allowed: 3"]),
    "more per token than experts": (lambda: routes(5), {"num_experts": 2, "top_k": None}, ["3 experts per token", "1 to 2"]),
    "no experts per token": (lambda: routes(5)[..., :0], {"top_k": None}, ["0 experts per token"]),
    "too few layers": (lambda: routes(5, layers=3), {}, ["3 layers", "(1, 3)", "another model"]),
    "floats": (lambda: routes(5).float(), {}, ["torch.float32 of shape (5, 2, 3)", "integers"]),
    "booleans": (lambda: routes(5) > 3, {}, ["torch.bool", "integers"]),
    "flattened": (lambda: routes(5).flatten(1), {}, ["shape (5, 6)", "[rows, layers, experts per token]"]),
    "ragged list": (lambda: [[[1, 2], [3]]], {}, ["list", "integers"]),
    "nothing": (lambda: None, {}, ["there is no routing"]),
    "start beyond the sequence": (lambda: routes(0), {"start": 7}, ["start=7", "0 to 6"]),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_has_its_own_message(name: str) -> None:
    build, changes, words = FAULTS[name]
    with pytest.raises(RoutingError) as caught:
        ingest(build(), **changes)
    message = str(caught.value)
    assert message.startswith("request r7")
    assert all(word in message for word in words), message


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
    if first is None:
        assert torch.equal(ingest(ids, **changes).experts.long(), ids)
    else:
        with pytest.raises(RoutingError, match=f"row {first}, layer 3: duplicate|all expert ids are zero"):
            ingest(ids, **changes)
