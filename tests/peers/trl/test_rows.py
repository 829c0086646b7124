"""Which batches' rows are known: those of the last two steps that generated, however many each step sampled."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mismatch_ext.adapters.trl.rows import RowTables, find_in, row_key
from mismatch_ext.adapters.trl.scoring import Scoring

from mismatch_ext.errors import ReplayError


def steps_known(tables: RowTables, *, training: bool = True) -> list[int]:
    return [table.step for table in tables.newest(training=training)]


def test_an_evaluation_pushes_no_training_row_out_and_is_forgotten_once_training_goes_on() -> None:
    tables = RowTables()
    tables.begin(training=True, step=4)
    for _ in range(5):
        tables.begin(training=False, step=5)
    assert steps_known(tables) == [4, 5] and steps_known(tables, training=False) == [5, 4]
    tables.begin(training=True, step=5)
    assert steps_known(tables) == [5, 4]


def test_the_newest_batch_with_a_row_tells_of_it() -> None:
    key, other = row_key([1, 2], [3]), row_key([1, 2], [4])
    older, newer = {key: 1, other: 2}, {key: 3}
    assert find_in([newer, older], [key, other, row_key([5], [6])]) == [3, 2, None]


def test_the_replay_of_some_rows_does_not_stand_for_that_of_others() -> None:
    scoring: Any = object.__new__(Scoring)
    vars(scoring).update(
        routing=SimpleNamespace(config=SimpleNamespace(mode="R3")), masking=None, trainer=SimpleNamespace(), remembered=(),
        _are_bad=lambda keys: torch.zeros(len(keys)),
    )  # fmt: skip
    completions = torch.tensor([[3], [4]])
    prompts, ones = torch.tensor([[1, 2], [1, 2]]), torch.ones(2, 3, dtype=torch.long)
    inputs = {
        "prompt_ids": prompts,
        "completion_ids": completions,
        "prompt_mask": ones[:, 1:],
        "completion_mask": ones[:, 2:],
    }
    one, other = row_key([1, 2], [3]), row_key([1, 2], [4])
    with scoring.of_loss(inputs):
        scoring.replayed.update([one, other])
    with pytest.raises(ReplayError, match="without a replayed forward pass"), scoring.of_loss(inputs):
        scoring.replayed.add(one)
    assert scoring.replayed is None
