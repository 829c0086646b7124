"""Bytes without shape or dtype become routing traces, or an error that names the count that was expected."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mismatch_ext.adapters.sglang import RoutingShape, decode_routes

from mismatch_ext.errors import RoutingError
from tests.unit.sglang_recorded import SHAPE, encoded, routes

GOOD = encoded(routes(6))


def decoded(value: Any, rows: int = 6, shape: RoutingShape = SHAPE) -> np.ndarray[Any, Any]:
    return decode_routes(value, rows=rows, shape=shape, request="r1")


@pytest.mark.parametrize("rows", [0, 5, 7])
def test_any_other_number_of_rows_is_refused(rows: int) -> None:
    with pytest.raises(RoutingError, match="request r1, meta_info.routed_experts: .*allowed: 96 .6 rows."):
        decoded(encoded(routes(rows)))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int64])
def test_ids_of_another_width_are_not_guessed(dtype: Any) -> None:
    with pytest.raises(RoutingError, match="counts or encodes rows otherwise"):
        decoded(encoded(routes(6).astype(dtype)))


@pytest.mark.parametrize("bad", [GOOD[:-1] + "!", GOOD[:64] + "\n" + GOOD[65:], GOOD + "A", "", None])
def test_text_that_was_altered_is_refused(bad: Any) -> None:
    with pytest.raises(RoutingError, match="request r1, meta_info.routed_experts: "):
        decoded(bad)


@given(st.integers(0, 6), st.integers(1, 4), st.integers(1, 4), st.sampled_from([8, 200, 300]))
def test_what_is_encoded_is_decoded(rows: int, layers: int, top_k: int, experts: int) -> None:
    ids = np.random.default_rng(rows).integers(0, experts, (rows, layers, top_k)).astype(np.int32)
    shape = RoutingShape(num_layers=layers, layers=tuple(range(layers)), num_experts=experts, top_k=top_k)
    assert decoded(encoded(ids), rows, shape).tolist() == ids.tolist()


@pytest.mark.parametrize("change", [{"num_experts": 0}, {"top_k": 9}, {"layers": (1, 0)}, {"num_layers": 1}])
def test_a_shape_is_checked(change: dict[str, Any]) -> None:
    with pytest.raises(RoutingError, match=f"routing shape {next(iter(change))}="):
        replace(SHAPE, **change)
