"""What was left to sample from, taken from an engine's arrays: as from its lists, in a few bytes for each position."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
from mismatch_ext.adapters.trl.sampling_mask import EngineMasks
from mismatch_ext.patches.vllm.top_logprobs import SampledLogprobs
from numpy.typing import NDArray

from mismatch_ext.bad_rows import BadRows
from mismatch_ext.errors import RecordError
from mismatch_ext.sampling_mask import LeftTokens, TokenSupport

Columns = tuple[NDArray[np.int32], NDArray[np.float32]]


def drawn(generator: np.random.Generator, positions: int, vocabulary: int, asked: int, least: int = 1) -> Columns:
    """Return what an engine reports of positions, at some of which a sampled token is NaN or was cut off."""
    ids, logprobs = np.empty((2, positions, asked + 1))
    for row in range(positions):
        logits = generator.normal(size=vocabulary)
        order = np.argsort(-logits)
        left = int(generator.integers(least, vocabulary + 1)) if generator.random() < 0.5 else min(least, vocabulary)
        logits[order[left:]] = -math.inf
        if generator.random() < 0.02:
            logits[order[0]] = math.nan
        sampled = order[generator.integers(left)] if generator.random() < 0.98 else order[-1]
        columns = [sampled, *order[:asked]]
        ids[row], logprobs[row] = columns, logits[columns]
    return ids.astype(np.int32), logprobs.astype(np.float32)


def outcome(of_lists: bool, columns: Columns, asked: int, vocabulary: int) -> object:
    given = {"asked": asked, "vocabulary": vocabulary, "name": "7"}
    try:
        if of_lists:  # as vLLM and TRL hand them on: each id once, None for NaN
            rows = [dict(zip(*row, strict=True)) for row in zip(*(one.tolist() for one in columns), strict=True)]
            values = [[None if math.isnan(value) else value for value in row.values()] for row in rows]
            found = TokenSupport.from_top([list(row) for row in rows], values, **given)  # type: ignore[arg-type]
        else:
            left = LeftTokens()
            for row in range(len(columns[0])):
                left.take(*(one[row : row + 1] for one in columns))
            found = left.support(**given)  # type: ignore[arg-type]
    except RecordError as error:
        return str(error)
    return found.ids.dtype, found.ids.tolist(), found.offsets.tolist(), found.vocabulary


def test_arrays_give_the_masks_and_the_errors_that_lists_give() -> None:
    generator = np.random.default_rng(0)
    errors = 0
    for _ in range(600):
        vocabulary = int(generator.choice([3, 5, 9, 40]))
        asked, positions = int(generator.integers(1, vocabulary + 1)), int(generator.integers(0, 6))
        columns = drawn(generator, positions, vocabulary, asked)
        ours, theirs = (outcome(lists, columns, asked, vocabulary) for lists in (False, True))
        assert ours == theirs
        errors += isinstance(ours, str)
    assert 100 < errors < 500


def test_completions_find_their_masks_by_the_very_lists_that_the_engine_returned() -> None:
    # With tensor parallelism each rank has the outputs of all, and TRL takes its own.
    outputs, completions = [], []
    for sampled in (4, 2, 4):
        logprobs = SampledLogprobs()
        logprobs.left.take(np.array([[sampled, sampled, 1, 0]]), np.array([[-0.3, -0.3, -1.0, -math.inf]]))
        logprobs.append({sampled: -0.3})
        completions.append([sampled])
        outputs.append(SimpleNamespace(outputs=[SimpleNamespace(token_ids=completions[-1], logprobs=logprobs)]))
    masks, mine = EngineMasks(asked=3, vocabulary=9), completions[1:]
    result = ([[5]] * 2, mine, [[[-0.3]]] * 2, [[[2]], [[4]]])
    supports, handed = masks.of(result, outputs, BadRows(2))
    assert [one.ids.tolist() for one in supports if one is not None] == [[1, 2], [1, 4]] and handed is result
    with pytest.raises(RecordError, match=r"rollout 0: its tokens are not those of an output of LLM\.generate"):
        masks.of((result[0], [[2], [4]], *result[2:]), outputs, BadRows(2))
