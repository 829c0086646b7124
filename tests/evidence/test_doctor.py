"""`mismatch-ext doctor` on real vLLM: nothing is named on clean runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.evidence.doctor_faults import CLEAN, CLEAN_EXPERTS, table
from tests.evidence.pages import slice_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1500)]
COMMAND = f"make evidence SLICE={slice_of('doctor_clean')}"


def test_nothing_is_named_on_clean_runs(evidence: Callable[..., None], tmp_path: Path) -> None:
    """The doctor names nothing on clean runs of a dense model in bfloat16, float16 and float32."""
    evidence("doctor_clean", table(CLEAN, tmp_path), command=COMMAND)


def test_nothing_is_named_on_clean_runs_with_experts(evidence: Callable[..., None], tmp_path: Path) -> None:
    """The doctor names nothing on clean runs of a model with experts: seeds, dtypes, a temperature on both sides."""
    evidence("doctor_clean_experts", table(CLEAN_EXPERTS, tmp_path), command=COMMAND)
