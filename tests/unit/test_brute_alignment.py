"""Traces laid along batches and packed rows, compared with a table of positions that is filled one by one."""

from __future__ import annotations

import random

import pytest
import torch

from mismatch_ext.errors import RoutingError
from mismatch_ext.routing import RoutingTrace, align, align_packed, storage_dtype

Table = dict[tuple[int, int], torch.Tensor]
"""Experts `[L, K]` of each recorded token, by row of the batch and position in its sequence."""


def drawn(seed: int) -> tuple[list[RoutingTrace], Table, list[int], list[int], int]:
    """Return traces of random sequences, the experts in them, tokens and left padding of each row, and the batch's width."""
    draw = random.Random(seed)
    layers, top_k, experts = draw.choice([1, 3]), draw.choice([1, 2]), draw.choice([4, 16, 256, 300])
    width, traces, lengths, lefts = draw.choice([1, 4, 9]), [], [], []
    table: Table = {}
    for row in range(draw.choice([1, 2, 5])):
        length = draw.randint(0, width)
        end = draw.choice([max(length - 1, 0), length])
        start = draw.randint(0, end) if draw.random() < 0.3 else 0
        ids = [[draw.sample(range(experts), top_k) for _ in range(layers)] for _ in range(start, end)]
        block = torch.tensor(ids, dtype=torch.int32).reshape(-1, layers, top_k)
        table |= {(row, start + at): block[at].long() for at in range(len(block))}
        cut = draw.randint(0, len(block))
        parts = tuple(part.to(storage_dtype(experts)) for part in (block[:cut], block[cut:]))
        traces.append(RoutingTrace(parts=parts, layers=tuple(range(1, layers + 1)), num_experts=experts, start=start))
        lengths.append(length)
        lefts.append(draw.randint(0, width - length))
    return traces, table, lengths, lefts, width


def check(seed: int, *, packed: bool) -> None:
    traces, table, lengths, lefts, width = drawn(seed)
    mask = torch.zeros(len(traces), width)
    for row, (left, length) in enumerate(zip(lefts, lengths, strict=True)):
        mask[row, left : left + length] = 1
    if packed:
        laid, recorded = align_packed(traces, lengths)
        begins, rows = [sum(lengths[:row]) for row in range(len(lengths))], sum(lengths)
    else:
        laid, recorded = align(traces, mask)
        begins, rows = [row * width + left for row, left in enumerate(lefts)], mask.numel()
    expected = {begins[row] + place: experts for (row, place), experts in table.items()}
    filler = torch.arange(traces[0].top_k).expand(len(traces[0].layers), -1)
    assert laid.rows == len(recorded) == rows
    for place in range(rows):
        assert bool(recorded[place]) == (place in expected), place
        assert torch.equal(laid.experts[place].long(), expected.get(place, filler)), place
    hole = mask.clone()
    if not packed and lengths[0] > 2:
        hole[0, lefts[0] + 1] = 0
        with pytest.raises(RoutingError, match="row 0: there is padding between its tokens"):
            align(traces, hole)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_every_token_has_its_experts(seed: int, packed: bool) -> None:
    check(seed, packed=packed)


@pytest.mark.nightly
@pytest.mark.parametrize("packed", [False, True])
def test_every_token_has_its_experts_in_thousands_of_batches(packed: bool) -> None:
    for seed in range(20, 3000):
        check(seed, packed=packed)
