"""Rows land at their tokens, whatever the padding."""

from __future__ import annotations

from typing import Any

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


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16])
def test_any_kind_of_mask_and_a_view_of_it(dtype: torch.dtype) -> None:
    wide = torch.tensor([[9, 0, 1, 1, 1, 1, 9]]).to(dtype)
    assert align([trace(3)], wide[:, 1:6])[1].tolist() == [False, True, True, True, False]


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        ([[1, 1, 1, 1]], r"2 routing traces for an attention mask of shape \(1, 4\)"),
        ([1, 1, 1, 1], r"shape \(4,\)"),
        ([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]], "row 1: its routing trace has 3 rows .*ends before 3"),
        ([[1, 1, 0, 0], [1, 1, 1, 1]], "row 0: .*ends before 3, but the row has 2 tokens"),
        ([[1, 1, 1, 1], [1, 0, 1, 1]], "row 1: there is padding between its tokens"),
    ],
)
def test_what_does_not_fit_is_refused(mask: list[Any], words: str) -> None:
    with pytest.raises(RoutingError, match=words):
        align([trace(3)] * 2, torch.tensor(mask))


def test_rows_of_two_models_and_packed_rows_that_do_not_fit_are_refused() -> None:
    with pytest.raises(RoutingError, match=r"row 1: .*layers \(1, 2\), that of row 0 .*layers \(1, 3\)"):
        align([trace(3), trace(3, layers=(1, 2))], torch.ones(2, 4))
    with pytest.raises(RoutingError, match="row 1: its routing trace has 3 rows"):
        align_packed([trace(3)] * 2, [4, 9])
