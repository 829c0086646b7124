"""The gap of parts of a batch: rows without padding, groups of tokens, and states merged in any order."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mismatch_ext.errors import NonFiniteLogprobError, RecordError
from mismatch_ext.metrics import GapGroups, MismatchAccumulator
from mismatch_ext.metrics import groups as module

pytestmark = pytest.mark.numeric


def drawn(lengths: list[int], seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return both sides' log-probabilities and the policy's tokens of rows that lie one after the other."""
    generator = torch.Generator().manual_seed(seed)
    places = sum(lengths)
    old = -3 * torch.rand(places, generator=generator)
    rollout = old + 0.05 * torch.randn(places, generator=generator)
    return old, rollout, torch.rand(places, generator=generator) < 0.7


def padded(values: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(values.split(lengths)), batch_first=True)


def same(found: Any, expected: Any) -> bool:
    return json.dumps(found) == json.dumps(expected)


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=6), seed=st.integers(0, 99), whole=st.booleans())
def test_rows_without_padding_are_measured_as_padded_ones(lengths: list[int], seed: int, whole: bool) -> None:
    old, rollout, mask = drawn(lengths, seed)
    chosen = None if whole else torch.rand(len(mask), generator=torch.Generator().manual_seed(seed)) < 0.5
    ragged, square = MismatchAccumulator(), MismatchAccumulator()
    ragged.update_rows(old, rollout, mask, torch.tensor(lengths), chosen)
    square.update(*(padded(x, lengths) for x in (old, rollout, mask)), None if whole else padded(chosen, lengths))  # type: ignore[arg-type]
    assert same(ragged.state_dict(), square.state_dict())


def test_a_position_is_the_tokens_number_among_the_policys_own() -> None:
    # Four tokens of the policy, five of a tool, and four more: without the tool the last four are positions 4 to 7.
    mask = torch.tensor([[True] * 4 + [False] * 5 + [True] * 4])
    tools, plain, late = (MismatchAccumulator() for _ in range(3))
    tools.update(torch.full((1, 13), -1.0), torch.full((1, 13), -1.5), mask)
    plain.update(torch.full((1, 8), -1.0), torch.full((1, 8), -1.5), torch.ones(1, 8))
    assert tools.compute().profiles["position"] == plain.compute().profiles["position"]
    # Of those that count alone, the position is the same.
    late.update(torch.full((1, 13), -1.0), torch.full((1, 13), -1.5), mask, torch.tensor([[False] * 9 + [True] * 4]))
    counts = dict(
        zip(late.compute().profiles["position"].edges, late.compute().profiles["position"].count, strict=False)
    )
    assert {edge: count for edge, count in counts.items() if count} == {4.0: 4}


def test_parts_in_any_order_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [7, 0, 31, 12, 3, 18]
    old, rollout, mask = drawn(lengths, 1)
    whole = MismatchAccumulator()
    whole.update_rows(old, rollout, mask, torch.tensor(lengths))
    monkeypatch.setattr(module, "TOGETHER", 20)  # a row is longer, and is measured alone
    parts = []
    for first, last in ((0, 2), (2, 3), (3, 6)):
        places = slice(sum(lengths[:first]), sum(lengths[:last]))
        part = GapGroups(seed=first)
        part.add("train", old[places], rollout[places], mask[places], torch.tensor(lengths[first:last]))
        part.add("late", old[places], rollout[places], mask[places], torch.tensor(lengths[first:last]), mask[places])
        parts.append(json.loads(json.dumps(part.state_dict())))
    for order in itertools.permutations(parts):
        merged = GapGroups()
        for state in order:
            merged.merge(state)
        assert merged.scalars("train") == pytest.approx(whole.compute().scalars, rel=1e-12, abs=1e-15)
        assert merged.scalars("late") == merged.scalars("train") and merged.scalars("other") == {}


def test_what_does_not_fit_is_refused() -> None:
    ones = torch.ones(3)
    with pytest.raises(RecordError, match="lengths .* add up to 4, and there are 3 places"):
        MismatchAccumulator().update_rows(-ones, -ones, ones, torch.tensor([2, 2]))
    with pytest.raises(RecordError, match="holds -1"):
        GapGroups().add("train", -ones, -ones, ones, torch.tensor([4, -1]))
    with pytest.raises(RecordError, match=r"chosen \[2\] does not fit response_mask \[3\]"):
        MismatchAccumulator().update_rows(-ones, -ones, ones, torch.tensor([3]), ones[:2])
    broken = torch.tensor([-1.0, -1.0, float("nan")])
    with pytest.raises(NonFiniteLogprobError, match=r"rollout_logprobs\[1, 0\]"):
        MismatchAccumulator().update_rows(-ones, broken, ones, torch.tensor([2, 1]))
