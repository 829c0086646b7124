"""What a trainer differs from itself by, and the token of the largest gap."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mismatch_ext.doctor import Diagnosis, diagnose, report
from mismatch_ext.doctor.rungs import Rung
from tests.unit.test_doctor import ROUNDING, drawn

LEFT = "prompts padded on the left, without position_ids"


def laid_left(size: float, *, float32: float) -> Diagnosis:
    """Diagnose a trainer whose padding moves its log-probabilities, and that differs in float32 by so much."""
    sample, scores = drawn()
    moved = size * np.random.default_rng(0).normal(size=len(scores.trainer))
    rung = Rung.of("trainer", LEFT, moved, np.full(64, float32))
    padded = replace(scores, trainer=scores.trainer + moved, straight=scores.trainer, layout=LEFT, rungs=(rung,))
    return diagnose(sample, padded)


def test_padding_that_only_rounds_otherwise_is_a_part_and_no_cause() -> None:
    found = laid_left(ROUNDING / 10, float32=1e-7)
    assert found.verdict == "clean" and not found.causes, report(found)
    assert "layout" in {part.name for part in found.parts} and found.rungs[0].of_gap is not None
    assert LEFT in report(found)


@pytest.mark.parametrize(("size", "float32"), [(ROUNDING / 10, 1e-3), (20 * ROUNDING, 1e-7)])
def test_padding_that_changes_the_policy_or_errs_beyond_rounding_is_named(size: float, float32: float) -> None:
    found = laid_left(size, float32=float32)
    assert [cause.key for cause in found.causes] == ["layout"] and found.verdict == "explained", report(found)
    assert ("in float32" in found.causes[0].said) == (float32 > 1e-5) and "position_ids" in report(found)


def test_near_ties_of_a_router_are_not_taken_for_another_policy() -> None:
    few = np.zeros(1000)
    few[3] = 0.5
    assert few.mean() > 1e-5 and not Rung.of("trainer", "packed", few, few).changes_the_policy
    assert Rung.of("trainer", "packed", few, np.full(1000, 2e-5)).changes_the_policy


def test_the_largest_gap_is_taken_apart() -> None:
    sample, scores = drawn()
    trainer = scores.trainer.copy()
    trainer[95] -= 2.0
    found = diagnose(sample, replace(scores, trainer=trainer))
    assert found.largest is not None and (found.largest.response, found.largest.token) == (3, 5)
    assert sum(found.largest.parts.values()) == pytest.approx(found.largest.gap, rel=1e-9)
    assert found.largest.gap == pytest.approx(2.0, abs=0.1) and found.largest.said() in report(found)
    assert found.largest.parts["trainer's arithmetic"] == pytest.approx(2.0, abs=0.1)


def test_a_kept_part_of_a_sample_is_in_the_order_that_was_asked_for() -> None:
    sample, _ = drawn()
    back = sample.part([3, 1]).part([1, 0])
    assert back.responses == (sample.responses[1], sample.responses[3])
    assert np.array_equal(back.engine, sample.engine[np.isin(sample.row, [1, 3])])
