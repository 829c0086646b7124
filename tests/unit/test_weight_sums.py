"""Sums by which tensors in pieces are compared, however a tensor is cut and however often it is held."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mismatch_ext.weight_sync import SyncObservation, WeightSyncChecker
from mismatch_ext.weight_sync.sums import SAMPLED_ROWS, Piece, Sums, added, compare_sums, sums_of

SHAPES = [(), (7,), (1, 5), (50, 3), (3 * SAMPLED_ROWS + 17, 5), (2 * SAMPLED_ROWS, 2, 3)]
NAME = "model.embed_tokens.weight"


def tensor(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def held(values: Tensor, cuts: list[int], dtype: torch.dtype = torch.float16) -> dict[str, Sums]:
    """Return the sums of a tensor that processes hold in pieces."""
    flat, bounds = values.reshape(-1), [0, *sorted(cuts), values.numel()]
    pieces = [
        Piece(values=flat[start:end], start=start, shape=tuple(values.shape))
        for start, end in zip(bounds, bounds[1:], strict=False)
    ]
    return added({NAME: sums_of(piece, dtype)} for piece in pieces)


@pytest.mark.parametrize("shape", SHAPES)
def test_pieces_add_up_to_the_whole_however_it_is_cut(shape: tuple[int, ...]) -> None:
    values = tensor(shape)
    whole = held(values, [])
    (found,) = compare_sums(whole, whole, {}, {NAME: shape})
    assert found.equal
    draw = torch.Generator().manual_seed(3)
    for count in range(1, 30):
        cuts = torch.randint(values.numel() + 1, (count,), generator=draw).tolist()
        assert held(values, cuts) == whole, cuts


@pytest.mark.parametrize("shape", SHAPES[1:])
def test_a_thousand_rows_enter_about_and_one_bit_of_any_of_them_shows(shape: tuple[int, ...]) -> None:
    values = tensor(shape)
    count = held(values, [])[NAME][0]
    assert count == values.numel() or SAMPLED_ROWS <= count / values[0].numel() < 2 * SAMPLED_ROWS
    stride = max(1, shape[0] // SAMPLED_ROWS) if len(shape) > 1 else 1
    for row in range(0, shape[0], stride * max(1, shape[0] // stride // 20)):
        changed = values.half()
        changed[row].view(torch.int16).view(-1)[-1] ^= 1
        assert held(changed, []) != held(values, [])


def test_rows_that_change_places_show() -> None:
    values = tensor((50, 3))
    swapped = values[torch.arange(50).flip(0)]
    assert held(values, [])[NAME][1] == held(swapped, [])[NAME][1] and held(values, []) != held(swapped, [])


@pytest.mark.parametrize("copies", [1, 2, 3, 4])
@pytest.mark.parametrize("others", [1, 2, 6])
def test_tensors_that_are_held_several_times_are_compared(copies: int, others: int) -> None:
    values, old = tensor((50, 3)), tensor((50, 3), 1)
    shapes = {NAME: (50, 3)}
    sent, before = (added([held(v, [17, 90])] * copies) for v in (values, old))
    (good,) = compare_sums(added([held(values, [])] * others), sent, before, shapes)
    assert good.equal and good.max_abs_diff == 0.0 and good.matches_previous is False
    (stale,) = compare_sums(added([held(old, [30])] * others), sent, before, shapes)
    assert not stale.equal and stale.max_abs_diff is None and stale.matches_previous is True
    (first,) = compare_sums(added([held(old, [30])] * others), sent, {}, shapes)
    assert first.matches_previous is None
    # One of several engines that kept its weights spoils the sum.
    if others > 1:
        (mixed,) = compare_sums(added([held(values, [])] * (others - 1) + [held(old, [])]), sent, before, shapes)
        assert not mixed.equal and mixed.matches_previous is False


def test_what_one_side_does_not_hold_whole_is_not_compared() -> None:
    values = tensor((50, 3))
    part = {NAME: sums_of(Piece(values=values[:20].reshape(-1), start=0, shape=(50, 3)), torch.float16)}
    nothing = {NAME: sums_of(Piece(values=values[:0].reshape(-1), start=0, shape=(50, 3)), torch.float16)}
    shapes = {NAME: (50, 3)}
    for other in (part, nothing, {}):
        assert compare_sums(other, held(values, []), {}, shapes) == []
        assert compare_sums(held(values, []), other, {}, shapes) == []


def test_a_difference_of_unknown_size_is_told_without_one() -> None:
    probes = tensor((8, 32)).double() - 10
    checker = WeightSyncChecker("float16")
    checker.baseline(probes, probes)
    comparisons = compare_sums(held(tensor((7,), 1), []), held(tensor((7,)), []), {}, {NAME: (7,)})
    seen = SyncObservation(
        engine_logprobs=probes + 1e-6, trainer_logprobs=probes, trainer_changed=True, comparisons=tuple(comparisons)
    )
    verdict = checker.observe(seen)
    assert (
        verdict.status == "garbled" and f"1 of 1 tensors differ from the trainer's, such as {NAME}." in verdict.message
    )
