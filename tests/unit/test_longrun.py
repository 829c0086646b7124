"""Runs of many steps: read whole, and drawn in stretches."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from mismatch_ext.log_reading import read_run
from mismatch_ext.report import build
from mismatch_ext.report.figures import MAX_POINTS, thinned
from tests.unit.synthetic_runs import header, run_stream


def test_ten_thousand_steps_are_read_and_reported(tmp_path: Path) -> None:
    with run_stream(tmp_path, header=header("bf16")) as out:
        for step in range(1, 10_001):
            gap = 5.5 if step == 3333 else 0.01
            out.step(step, {"reward": 0.5, "mismatch/tokens": 9.0, "mismatch/logp_abs_diff_mean": gap})
            out.event(step, "info", "weight_sync", f"verified at {step}")
    data = read_run(tmp_path)
    steps, values = data.series("mismatch/logp_abs_diff_mean")
    assert steps == list(range(1, 10_001)) and values.index(5.5) == 3332
    report = build(tmp_path)
    (row,) = report.summary.rows
    assert row.steps == 10_000 and row.values["logp_abs_diff_mean"] == pytest.approx((9_999 * 0.01 + 5.5) / 10_000)
    page = report.path.read_text(encoding="utf-8")
    assert "curves of train show 1000 stretches of its 10000 steps" in page
    assert "10000 times; the last: verified at 10000" in page  # the events, in one row


def test_a_curve_that_is_drawn_in_stretches_keeps_its_peaks() -> None:
    steps = list(range(1, 50_001))
    values: list[float | None] = [math.sin(step / 700) for step in steps]
    values[12_345], values[30_000], values[40_000] = 9.0, -9.0, None
    shown, drawn = thinned(steps, values)
    assert len(shown) <= 1.5 * MAX_POINTS and shown == sorted(set(shown))
    assert (shown[0], shown[-1]) == (1, 50_000)
    found = dict(zip(shown, drawn, strict=True))
    assert (found[12_346], found[30_001], found[40_001]) == (9.0, -9.0, None)
    assert all(values[step - 1] == value for step, value in found.items())
    assert thinned(steps[:MAX_POINTS], values[:MAX_POINTS]) == (steps[:MAX_POINTS], values[:MAX_POINTS])
