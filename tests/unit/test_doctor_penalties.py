"""What penalties count, engine by engine, and near-ties beyond a truncation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mismatch_ext.doctor import Sample
from mismatch_ext.doctor.logits import LATE, PENALTIES, RESPONSE, WHOLE, LogitTable, Occurring, _penalized
from mismatch_ext.doctor.tokens import judge_tokens
from tests.unit.test_doctor import best_of, drawn, nucleus

V = 8


def one(prompt: tuple[int, ...], response: tuple[int, ...], logits: torch.Tensor) -> LogitTable:
    """Return the table of a response beside one of a single token."""
    sample = Sample(
        prompts=(prompt, (0,)), responses=(response, (0,)), masks=((True,) * len(response), (True,)),
        logprobs=((-1.0,) * len(response), (-1.0,)),
    )  # fmt: skip
    return LogitTable.of(sample, logits, 1.0)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("key", list(PENALTIES))
def test_a_penalty_is_that_of_all_logits(key: str, temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    prompt, response = (1, 2, 2), (3, 4, 4, 5, 1, 3)
    logits = torch.randn(len(response), V, generator=generator) * 4
    sample = Sample(
        prompts=(prompt, prompt), responses=(response, response), masks=((True,) * 6, (True, False, True, False, True, True)),
        logprobs=((-1.0,) * 6, (-1.0,) * 6),
    )  # fmt: skip
    table = LogitTable.of(sample, torch.cat([logits, logits[[0, 2, 4, 5]]]), temperature)
    change, grid, _, countings = PENALTIES[key]
    for counted in countings:
        heads = {WHOLE: prompt, RESPONSE: (), LATE: prompt[-1:]}
        for x in grid:
            found = _penalized(table, Occurring.of(table), change, counted, x)
            for at, (row, place) in enumerate(zip(sample.row, sample.place, strict=True)):
                seen = [*heads[counted], *sample.responses[row]][: place + len(heads[counted]) - (counted == LATE)]
                counts = torch.bincount(torch.tensor(seen, dtype=torch.int64), minlength=V).double()
                changed = change(logits[place].double(), counts, x) / temperature
                assert found[at] == pytest.approx(float(changed.log_softmax(-1)[response[place]]), abs=1e-9)


@pytest.mark.parametrize(("below", "beyond"), [(0.99, 0), (0.9, 200)])
def test_a_near_tie_is_not_beyond_a_truncation(below: float, beyond: int) -> None:
    # Three tokens alike, and the fourth, which was sampled, a little or further below: bfloat16 may have swapped the former.
    logits = torch.full((201, V), -30.0)
    logits[:, :3], logits[:, 3] = 0.0, float(torch.tensor(below).log())
    table = one((1,), (3,) * 200, logits)
    (found,) = [count for count in judge_tokens(table).outside if (count.setting, count.value) == ("top_k", 3.0)]
    assert found.seen == beyond


@pytest.mark.parametrize(
    ("change", "setting", "near"),
    [
        (nucleus(0.83), "top_p", (0.8, 0.86)),
        (best_of(4), "top_k", (4, 4)),
    ],
)
def test_truncations_are_told_apart_by_the_mass_that_they_keep(
    change: Callable[[Tensor], Tensor], setting: str, near: tuple[float, float]
) -> None:
    sample, scores = drawn(change, reported=lambda z: z, responses=240)
    found = judge_tokens(LogitTable.of(sample, scores.logits, 1.0))
    best = found.truncated
    assert best is not None and best.setting == setting and near[0] <= best.value <= near[1], found.finding
    assert found.alike == ()
