"""`mismatch-ext doctor` on real vLLM: nothing is named on clean runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.peers.doctor.faults import CLEAN, CLEAN_EXPERTS, table

pytestmark = [pytest.mark.nightly, pytest.mark.engine, pytest.mark.timeout(1500)]


def test_nothing_is_named_on_clean_runs(tmp_path: Path) -> None:
    """The doctor names nothing on clean runs of a dense model in bfloat16, float16 and float32."""
    table(CLEAN, tmp_path)


def test_nothing_is_named_on_clean_runs_with_experts(tmp_path: Path) -> None:
    """The doctor names nothing on clean runs of a model with experts: seeds, dtypes, a temperature on both sides."""
    table(CLEAN_EXPERTS, tmp_path)
