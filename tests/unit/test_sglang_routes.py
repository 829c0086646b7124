"""Bytes without shape or dtype become routing traces, or an error that names the count that was expected."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mismatch_ext.adapters.sglang import RoutingShape, decode_routes, to_trace

from mismatch_ext.errors import RoutingError
from mismatch_ext.routing import RoutingTrace
from tests.unit.sglang_recorded import SHAPE, encoded, routes


def trace(value: Any, **changes: Any) -> RoutingTrace:
    """Decode the routes of request r1: 4 + 3 tokens, so 6 rows of 2 layers and 2 experts."""
    given: dict[str, Any] = {"prompt_tokens": 4, "output_tokens": 3, "shape": SHAPE, "start": 0, "version": 5}
    return to_trace(value, **(given | {"request": "r1"} | changes))


FORMS = {
    "base64": encoded,
    "bytes": lambda ids: ids.tobytes(),
    "bytearray": lambda ids: bytearray(ids.tobytes()),
    "array": lambda ids: ids,
    "flat": lambda ids: ids.reshape(-1),
    "tensor": torch.from_numpy,
    "int64": lambda ids: torch.from_numpy(ids).long(),
    "uint8": lambda ids: ids.astype(np.uint8),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_the_field_gives_the_same_trace(form: str) -> None:
    found = trace(FORMS[form](routes(6)))
    assert torch.equal(found.experts.long(), torch.from_numpy(routes(6)).long())
    assert (found.start, found.versions, found.layers, found.num_experts) == (0, ((0, 5),), (0, 1), 8)


@pytest.mark.parametrize("form", FORMS)
def test_any_other_number_of_rows_is_refused(form: str) -> None:
    for rows in (0, 1, 3, 5, 7, 8):
        with pytest.raises(RoutingError, match="request r1, meta_info.routed_experts: .*allowed: "):
            trace(FORMS[form](routes(rows)), start=4)


def test_the_message_counts_rows_and_bytes() -> None:
    with pytest.raises(RoutingError) as error:
        trace(encoded(routes(9)))
    text = str(error.value)
    assert "144 bytes, 9 rows; allowed: 96 (6 rows) of 2 layers x 2 experts x 4 bytes" in text
    with pytest.raises(
        RoutingError, match=r"13 bytes, no whole number of rows of 16 bytes; allowed: 96 .6 rows. or 32"
    ):
        decode_routes(b"x" * 13, rows=6, full_rows=2, shape=SHAPE, request="r1")


def test_narrower_ids_are_named_and_not_guessed() -> None:
    for dtype, bits in ((np.uint8, "8-bit"), (np.uint16, "16-bit"), (np.int64, "64-bit")):
        with pytest.raises(RoutingError, match=f"the length of {bits} ids; allowed: 32-bit ids, as sglang 0.5.12"):
            trace(encoded(routes(6).astype(dtype)))


def test_text_that_was_altered_is_refused() -> None:
    good = encoded(routes(6))
    assert len(good) == 128 and not good.endswith("=")
    for bad in (
        good[:-1] + "!",
        good[:-1] + "\u20ac",
        "=" * 128,
        good[:64] + "\n" + good[65:],
        good[:60] + "====" + good[64:],
    ):
        with pytest.raises(RoutingError, match="request r1, meta_info.routed_experts: "):
            trace(bad)
    for cut in (good[:-1], good[:-3], good + "A", ""):
        with pytest.raises(RoutingError, match="request r1, meta_info.routed_experts: .*(bytes|characters)"):
            trace(cut)


@pytest.mark.parametrize(
    "value",
    [
        3,
        [[[1, 2], [3, 4]]] * 6,
        routes(6).astype(np.float32),
        routes(6) > 3,
        torch.from_numpy(routes(6)).float(),
        torch.from_numpy(routes(6)).to_sparse(),
        torch.empty(6, 2, 2, dtype=torch.int32, device="meta"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_types_are_refused(value: Any) -> None:
    with pytest.raises(
        RoutingError, match="request r1, meta_info.routed_experts: found .*base64 text, bytes, or integers"
    ):
        trace(value)


def test_the_dense_layers_that_sglang_counts_are_dropped() -> None:
    shape = RoutingShape(num_layers=4, layers=(1, 3), num_experts=8, top_k=2)
    every = np.zeros((6, 4, 2), np.int32)
    every[:, 1], every[:, 3] = routes(6)[:, 0], routes(6)[:, 1]
    found = trace(encoded(every), shape=shape)
    assert found.layers == (1, 3) and found.experts.tolist() == routes(6).tolist()


@pytest.mark.parametrize("start", [-1, 5])
def test_a_start_beyond_the_prompt_is_refused(start: int) -> None:
    with pytest.raises(RoutingError, match=f"request r1: routed_experts_start={start}; allowed: 0 to 4"):
        trace(encoded(routes(6)), start=start)


def test_a_prompt_that_was_only_scored_may_leave_no_row() -> None:
    assert trace("", prompt_tokens=1, output_tokens=0).rows == 0
    assert trace(encoded(routes(3)), output_tokens=0, start=4).rows == 0
    assert trace(b"", output_tokens=0, start=4).rows == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": 0}, "num_experts=0"),
        ({"top_k": 0}, "top_k=0"),
        ({"top_k": 9}, r"top_k=9 is out of range; allowed: 1 to num_experts \(8\)"),
        ({"layers": ()}, r"layers=\(\)"),
        ({"layers": (1, 0)}, r"layers=\(1, 0\)"),
        ({"num_layers": 1}, "num_layers=1 is out of range; allowed: more than 1"),
    ],
)
def test_a_shape_is_checked(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RoutingError, match=f"routing shape {message}"):
        RoutingShape(**({"num_layers": 2, "layers": (0, 1), "num_experts": 8, "top_k": 2} | change))


@given(
    st.integers(0, 6),
    st.integers(0, 6),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from([8, 200, 300]),
    st.data(),
)
def test_what_is_encoded_is_decoded(
    prompt: int, output: int, layers: int, top_k: int, experts: int, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, prompt))
    full = max(prompt + output - 1, 0)
    ids = np.random.default_rng(full).permuted(np.tile(np.arange(experts), (full, layers, 1)), axis=2)[..., :top_k]
    shape = RoutingShape(num_layers=layers, layers=tuple(range(layers)), num_experts=experts, top_k=top_k)
    sent = ids if data.draw(st.booleans()) else ids[start:]
    found = to_trace(
        encoded(sent.astype(np.int32)),
        prompt_tokens=prompt, output_tokens=output, shape=shape, start=start, version=0, request="r",
    )  # fmt: skip
    assert found.experts.tolist() == ids[start:].tolist()
    assert found.start == start
