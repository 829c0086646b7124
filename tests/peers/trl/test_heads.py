"""Most likely tokens of single rows that are no distribution: the row is bad, and the others keep theirs."""

from __future__ import annotations

import math
from typing import Any

from mismatch_ext.adapters.trl.centering import EngineHeads

from mismatch_ext.bad_rows import BadRows

GOOD, HEAVY = [math.log(0.6), math.log(0.3)], [math.log(0.9), math.log(0.8)]


def answered(*rows: list[float]) -> tuple[Any, ...]:
    """Return what TRL's wrapper returns of completions of one token, whose two likeliest tokens have these log-probabilities."""
    return [[1]] * len(rows), [[4]] * len(rows), [[row] for row in rows], [[[4, 9]]] * len(rows)


def test_a_faulty_row_is_bad_and_the_others_keep_their_heads() -> None:
    bad = BadRows(3)
    heads, result = EngineHeads(2, served=True).of(answered(GOOD, HEAVY, GOOD), None, bad)
    assert [fault.reason for fault in bad.faults.values()] == ["head"] and list(bad.faults) == [1]
    assert "more probability than 1" in bad.faults[1].message
    assert heads[1] is None
    assert [head.ids.tolist() for head in heads if head is not None] == [[[4, 9]]] * 2
    # TRL gets the sampled token alone.
    assert result[2] == [[[GOOD[0]]], [[HEAVY[0]]], [[GOOD[0]]]] and result[3] == [[[4]]] * 3
