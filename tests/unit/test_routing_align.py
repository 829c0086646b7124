"""Rows land at their tokens, whatever the padding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mismatch_ext.errors import RoutingError
from mismatch_ext.routing import RoutingTrace, align, align_packed
from tests.unit.test_routing_trace import trace

sequences = st.lists(
    st.tuples(st.integers(0, 7), st.integers(0, 7), st.booleans(), st.integers(0, 3), st.integers(0, 3)),
    min_size=1, max_size=5,
)  # fmt: skip


def _traces(drawn: list[tuple[int, int, bool, int, int]], experts: int) -> tuple[list[RoutingTrace], list[int]]:
    """Return a trace per drawn (tokens, start, full pass, ...), in two parts where it has two rows."""
    traces, tokens = [], []
    for index, (count, start, full, _, _) in enumerate(drawn):
        end = count if full else max(count - 1, 0)
        start = min(start, end)
        whole = trace(end - start, experts=experts, seed=index, start=start, versions=((0, index),))
        half = whole.rows // 2
        if half:
            whole = RoutingTrace.concat([whole.slice(0, half), whole.slice(half, whole.rows)])
        traces.append(whole)
        tokens.append(count)
    return traces, tokens


@given(drawn=sequences, experts=st.sampled_from([8, 300]))
def test_rows_come_back_from_where_they_were_laid(drawn: list[tuple[int, int, bool, int, int]], experts: int) -> None:
    traces, tokens = _traces(drawn, experts)
    lefts = [left for *_, left, _ in drawn]
    width = max(1, *(left + count + right for (count, _, _, left, right) in drawn))
    attention = torch.zeros(len(drawn), width, dtype=torch.int64)
    expected = torch.zeros(len(drawn), width, dtype=torch.bool)
    for row, (count, left, one) in enumerate(zip(tokens, lefts, traces, strict=True)):
        attention[row, left : left + count] = 1
        expected[row, left + one.start : left + one.start + one.rows] = True
    laid, mask = align(traces, attention)
    assert torch.equal(mask, expected.flatten())
    assert laid.rows == len(drawn) * width
    for row, (left, one) in enumerate(zip(lefts, traces, strict=True)):
        at = row * width + left + one.start
        found = laid.slice(at, at + one.rows)
        assert torch.equal(found.experts, one.experts)
        if one.rows:
            assert found.versions == one.versions
    # Filler is a route that a router could have chosen: distinct ids in range.
    assert (laid.experts[~mask].long() == torch.arange(3)).all()


@given(drawn=sequences)
def test_a_packed_row_is_a_padded_batch_without_its_padding(drawn: list[tuple[int, int, bool, int, int]]) -> None:
    traces, tokens = _traces(drawn, 300)
    width = max(1, *tokens)
    attention = torch.arange(width) < torch.tensor(tokens)[:, None]
    padded, padded_mask = align(traces, attention)
    packed, mask = align_packed(traces, tokens)
    assert packed.rows == sum(tokens)
    assert torch.equal(packed.experts, padded.experts[attention.flatten()])
    assert torch.equal(mask, padded_mask[attention.flatten()])


def test_versions_follow_the_rows() -> None:
    # Row 0: versions 3, 3, 4 at positions 0-2; row 1 of version 4, row 2 of version 5, four positions each.
    traces = [trace(3, versions=((0, 3), (2, 4))), trace(3, versions=((0, 4),)), trace(3, versions=((0, 5),))]
    laid, _ = align(traces, torch.ones(3, 4))
    assert laid.versions == ((0, 3), (2, 4), (8, 5))
    late, _ = align([trace(2, start=2, versions=((0, 7),))], torch.tensor([[0, 1, 1, 1, 1]]))
    assert late.versions == ((0, 7),)  # what precedes the first recorded row is filler


def test_any_kind_of_mask_and_a_view_of_it() -> None:
    one = trace(3)
    wide = torch.tensor([[9, 0, 1, 1, 1, 1, 9]])
    for mask in (wide[:, 1:6], wide[:, 1:6].bool(), wide[:, 1:6].float(), wide[:, 1:6].to(torch.bfloat16)):
        assert align([one], mask)[1].tolist() == [False, True, True, True, False]


def test_the_target_device_is_used() -> None:
    laid, mask = align([trace(3)], torch.ones(1, 4), device="meta")
    assert laid.parts[0].device.type == mask.device.type == "meta"


def test_what_does_not_fit_is_refused() -> None:
    one = trace(3)
    with pytest.raises(RoutingError, match=r"1 routing traces for an attention mask of shape \(2, 4\)"):
        align([one], torch.ones(2, 4))
    with pytest.raises(RoutingError, match=r"shape \(4,\)"):
        align([one], torch.ones(4))
    with pytest.raises(
        RoutingError, match="row 1: its routing trace has 3 rows .*ends before 3, but the row has 5 tokens"
    ):
        align([one, one], torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]))
    with pytest.raises(RoutingError, match="row 0: .*ends before 3, but the row has 2 tokens"):
        align([one], torch.tensor([[1, 1, 0, 0]]))
    with pytest.raises(RoutingError, match="row 1: there is padding between its tokens"):
        align([one, one], torch.tensor([[1, 1, 1, 1], [1, 0, 1, 1]]))
    with pytest.raises(RoutingError, match=r"row 1: .*layers \(1, 2\), that of row 0 .*layers \(1, 3\)"):
        align([one, trace(3, layers=(1, 2))], torch.ones(2, 4))
    with pytest.raises(RoutingError, match=r"0 routing traces for an attention mask of shape \(0, 4\)"):
        align([], torch.ones(0, 4))
    with pytest.raises(RoutingError, match=r"shape \(1, 0\)"):
        align([trace(0)], torch.ones(1, 0))
    with pytest.raises(RoutingError, match="1 routing traces for 2 packed sequences"):
        align_packed([one], [4, 4])
    with pytest.raises(RoutingError, match="row 1: its routing trace has 3 rows"):
        align_packed([one, one], [4, 9])
