"""`mismatch-ext doctor` on real vLLM: faults of an engine with experts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.evidence.doctor_faults import EXPERTS, table
from tests.evidence.pages import slice_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1500)]
COMMAND = f"make evidence SLICE={slice_of('doctor_experts')}"


def test_faults_are_named_with_experts_too(evidence: Callable[..., None], tmp_path: Path) -> None:
    """The doctor names what an engine with experts does otherwise, under its own routes."""
    evidence("doctor_experts", table(EXPERTS, tmp_path), command=COMMAND)
