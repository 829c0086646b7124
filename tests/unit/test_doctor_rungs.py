"""What a side differs from itself by: an engine's decode, a trainer's padding, and the token of the largest gap."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from mismatch_ext.adapters.doctor.blocks import summary

from mismatch_ext.doctor import Diagnosis, diagnose, report
from mismatch_ext.doctor.evidence import ALONE, DECODE, Block, Engine, Rung
from mismatch_ext.doctor.fits import FLOAT32_UNITS
from tests.unit.test_doctor import ROUNDING, drawn, drift

LEFT = "prompts padded on the left, without position_ids"


def said_by(decode: np.ndarray, prefill: np.ndarray, batches: float = 0.0) -> Engine:
    noise = np.full(64, batches)
    rungs = (Rung.of("engine", DECODE, decode), Rung.of("engine", ALONE, noise))
    return Engine(rungs=rungs, decode=decode, prefill=prefill)


def stale_decode(*, size: float = 0.2, batches: float = 0.0) -> Diagnosis:
    """Diagnose an engine whose decode has other weights than its prefill."""
    sample, scores = drawn(extra=lambda z: drift(z, size))
    prefill = scores.own
    return diagnose(sample, scores, engine=said_by(sample.engine - prefill, prefill, batches))


def test_a_decode_that_differs_from_its_prefill_is_named_before_any_fit() -> None:
    found = stale_decode()
    assert [cause.key for cause in found.causes] == ["decode_path"] and found.verdict == "explained", report(found)
    assert found.causes[0].status == "measured" and (found.causes[0].share or 0) > 0.5
    assert found.parts[0].name == "decode_path" and found.ratio == pytest.approx(1, abs=0.3), "the prefill is right"
    assert "--enforce-eager" in report(found) and found.exit_status(0.0) == 1


def test_a_decode_within_rounding_or_within_the_engines_own_batches_is_no_cause() -> None:
    assert not stale_decode(size=0.0).causes
    noisy = stale_decode(batches=1.0)
    assert "decode_path" not in {cause.key for cause in noisy.causes} and noisy.verdict != "clean"


def laid_left(size: float, *, float32: float) -> Diagnosis:
    """Diagnose a trainer whose padding moves its log-probabilities, and that differs in float32 by so much."""
    sample, scores = drawn()
    moved = size * np.random.default_rng(0).normal(size=len(scores.trainer))
    rung = Rung.of("trainer", LEFT, moved, np.full(64, float32), float32_error=scores.float32_error)
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
    own = 1e-6
    assert few.mean() > FLOAT32_UNITS * own
    assert not Rung.of("trainer", "packed", few, few, float32_error=own).changes_the_policy
    beyond = np.full(1000, 2 * FLOAT32_UNITS * own)
    assert Rung.of("trainer", "packed", few, beyond, float32_error=own).changes_the_policy


def test_the_largest_gap_is_taken_apart() -> None:
    sample, scores = drawn()
    trainer = scores.trainer.copy()
    trainer[95] -= 2.0
    found = diagnose(sample, replace(scores, trainer=trainer))
    assert found.largest is not None and (found.largest.response, found.largest.token) == (3, 5)
    assert sum(found.largest.parts.values()) == pytest.approx(found.largest.gap, rel=1e-9)
    assert found.largest.gap == pytest.approx(2.0, abs=0.1) and "largest gap, +2.0" in report(found)
    assert found.largest.parts["trainer's arithmetic"] == pytest.approx(2.0, abs=0.1)


def test_a_block_that_stands_out_is_named_by_layer_and_kind() -> None:
    blocks = [Block(layer=at, kind="mlp", error=1.1e-3, own=1e-3) for at in range(3)]
    assert "no block stands out" in summary(blocks)
    wrong = Block(layer=3, kind="mlp", error=8e-3, own=1e-3)
    assert summary([*blocks, wrong]) == "largest at layer 3, mlp: 8.0 of rounding's; 1 of 4 blocks"
