"""Rows land at their tokens, whatever the padding."""

from __future__ import annotations

import pytest
import torch

from mismatch_ext.errors import RoutingError
from mismatch_ext.routing import align, align_packed
from tests.unit.test_routing_trace import trace


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
