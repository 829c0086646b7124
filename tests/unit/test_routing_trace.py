"""The record itself: parts, slices, pieces, headers."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mismatch_ext.errors import ReplayError, RoutingError
from mismatch_ext.routing import RoutingTrace, storage_dtype
from mismatch_ext.routing.tokens import Proof, token_rows
from tests.traces import same


def routes(rows: int, layers: int = 2, top_k: int = 3, experts: int = 8, seed: int = 0) -> Tensor:
    """Return distinct expert ids per row `[rows, layers, top_k]`, int64."""
    order = np.random.default_rng(seed).random((rows, layers, min(experts, 300))).argsort(-1)
    ids = torch.from_numpy(order[..., :top_k].copy())
    return ids if experts <= 300 else ids + (experts - 300)


def trace(
    rows: int, *, layers: tuple[int, ...] = (1, 3), top_k: int = 3, experts: int = 8, seed: int = 0, **fields: Any
) -> RoutingTrace:
    """Return a trace of random routes in one part."""
    ids = routes(rows, len(layers), top_k, experts, seed).to(storage_dtype(experts))
    return RoutingTrace(parts=(ids,), layers=layers, num_experts=experts, **fields)


@pytest.mark.parametrize(("experts", "dtype", "size"), [(256, torch.uint8, 1), (257, torch.uint16, 2)])
def test_ids_take_one_byte_up_to_256_experts(experts: int, dtype: torch.dtype, size: int) -> None:
    found = trace(5, experts=experts)
    assert found.experts.dtype == dtype and found.nbytes == 5 * 2 * 3 * size  # rows x layers x experts per token
    assert torch.equal(found.layer(3), routes(5, experts=experts)[:, 1])


@given(rows=st.integers(0, 12), cuts=st.lists(st.integers(0, 12), max_size=4), start=st.integers(0, 3))
def test_pieces_of_a_trace_join_to_the_trace(rows: int, cuts: list[int], start: int) -> None:
    versions = ((0, 1), (rows // 2, 4)) if rows > 1 else ((0, 1),)
    whole = trace(rows, experts=300, start=start, versions=versions)
    edges = [0, *sorted(min(cut, rows) for cut in cuts), rows]
    pieces = [whole.slice(a, b) for a, b in zip(edges, edges[1:], strict=False)]
    joined = RoutingTrace.concat(pieces)
    assert same(joined, whole)
    # Cuts across parts see the same rows as cuts of one block.
    for first in range(rows + 1):
        assert torch.equal(joined.slice(first, rows).experts, whole.experts[first:])


def test_pieces_must_follow_each_other_and_be_of_one_model() -> None:
    whole = trace(6, start=2)
    with pytest.raises(RoutingError, match="piece 1 .*starts at position 6, .*ends before 5"):
        RoutingTrace.concat([whole.slice(0, 3), whole.slice(4, 6)])
    with pytest.raises(RoutingError, match="MoE layers"):
        RoutingTrace.concat([whole, trace(2, start=8, layers=(1, 2))])


@pytest.mark.parametrize(
    ("model", "words"),
    [({"layers": (1, 2)}, "MoE layers"), ({"num_experts": 16}, "experts per layer 8"), ({"top_k": 2}, "per token 3")],
)
def test_a_trace_of_another_model_says_what_differs(model: dict[str, Any], words: str) -> None:
    fitting: dict[str, Any] = {"layers": [1, 3], "num_experts": 8, "top_k": 3}
    trace(3).expect_model(**fitting)
    with pytest.raises(RoutingError, match=words):
        trace(3).expect_model(**(fitting | model))


@pytest.mark.parametrize("experts", [8, 300])
def test_a_trace_survives_the_way_to_another_process(experts: int) -> None:
    sent = trace(4, experts=experts, start=2, versions=((0, 1), (2, 3)))
    found = pickle.loads(pickle.dumps(sent))
    assert same(found, sent) and found.experts.dtype == sent.experts.dtype


def test_a_prompt_that_two_traces_share_is_sent_once() -> None:
    sent = trace(4)
    one, two = pickle.loads(pickle.dumps([sent, replace(sent, start=3)]))
    assert one.parts[0] is two.parts[0]


def test_tokens_follow_their_rows() -> None:
    told = trace(6, start=2).of_tokens(range(50, 60))
    assert told.tokens is not None and told.tokens.tolist() == list(range(50, 58))
    first, last = told.slice(0, 3), told.slice(3, 6)
    # A row's route depends on all tokens before it: a piece knows them too.
    assert last.start == 5 and last.tokens is not None and last.tokens.tolist() == list(range(50, 58))
    assert same(RoutingTrace.concat([first, last]), told)
    rows = told.token_rows()
    assert rows is not None and rows.ids.tolist() == list(range(52, 58)) and not rows.starts.any()
    own = told.sequence(3, 6)
    assert own.start == 0 and own.tokens is not None and own.tokens.tolist() == [55, 56, 57]
    with pytest.raises(RoutingError, match="piece 0 of a routing trace is of other tokens than the last"):
        RoutingTrace.concat([first, replace(last, tokens=last.tokens + 1)])
    with pytest.raises(RoutingError, match="the routing trace is of other tokens than these"):
        told.of_tokens(range(51, 61))


def test_a_pass_is_over_its_tokens_or_not() -> None:
    ids = torch.tensor([[0, 5, 6, 7], [8, 9, 5, 0]])
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0]])
    wanted = token_rows(ids, mask)

    def differs(*args: Any) -> list[int]:
        return wanted.differ(token_rows(*args)).nonzero().flatten().tolist()

    assert (
        differs(ids, mask) == differs(torch.where(mask == 1, ids, 3), mask) == []
    )  # what stands in the padding is nothing
    assert differs(ids + 1, mask) == [1, 2, 3, 4, 5, 6]
    assert differs(ids) == [1]  # the sequence begins a token earlier; padding behind the other one is seen by nobody
    assert differs(ids, mask, torch.tensor([0, 1, 3, 4])[None]) == [2, 6]


def test_packed_rows_are_those_of_their_sequences() -> None:
    packed = token_rows(torch.tensor([[5, 6, 7, 8]]), None, torch.tensor([[0, 1, 0, 1]]))
    assert not packed.differ(token_rows(torch.tensor([[5, 6], [7, 8]]))).any()
    assert packed.differ(token_rows(torch.tensor([[5, 6, 7, 8]]))).tolist() == [False, False, True, False]


def test_other_passes_are_counted_once() -> None:
    wanted, other = (token_rows(torch.tensor([ids])) for ids in ([5, 6], [5, 7]))
    proof = Proof(wanted, 2, "native")
    assert proof.holds(wanted, "here") and not proof.holds(other, "here") and not proof.holds(other, "here", again=True)
    assert not proof.holds("it was given none", "here") and proof.others == 2 and "it was given none" in proof.reason
    proof.expect_replayed(1, "here")
    with pytest.raises(ReplayError, match="here: none of the 2 forward passes"):
        proof.expect_replayed(0, "here")
    with pytest.raises(
        ReplayError, match="here: a forward pass is over other tokens than its routes: 1 of 2 rows differ"
    ):
        Proof(wanted, 2, "refuse").holds(other, "here")
    assert Proof(None, 2, "replay").holds(other, "here")
    with pytest.raises(RoutingError, match="does not know which tokens"):
        Proof(None, 2, "native")
