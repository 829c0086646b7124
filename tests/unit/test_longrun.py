"""Runs of many steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from mismatch_ext.report import build
from tests.unit.synthetic_runs import header, run_stream


def test_ten_thousand_steps_are_read_and_reported(tmp_path: Path) -> None:
    with run_stream(tmp_path, header=header("bf16")) as out:
        for step in range(1, 10_001):
            out.step(step, {"mismatch/tokens": 9.0, "mismatch/logp_abs_diff_mean": 5.5 if step == 3333 else 0.01})
            out.event(step, "info", "weight_sync", f"verified at {step}")
    report = build(tmp_path)
    (row,) = report.summary.rows
    assert row.logs == 10_000 and row.values["logp_abs_diff_mean"] == pytest.approx((9_999 * 0.01 + 5.5) / 10_000)
    page = report.path.read_text(encoding="utf-8")
    assert "10000 times; the last: verified at 10000" in page  # the events, in one row
