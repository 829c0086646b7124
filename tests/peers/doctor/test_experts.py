"""`mismatch-ext doctor` on real vLLM: faults of an engine with experts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.peers.doctor.faults import EXPERTS, table

pytestmark = [pytest.mark.nightly, pytest.mark.engine, pytest.mark.timeout(1500)]


def test_faults_are_named_with_experts_too(tmp_path: Path) -> None:
    """The doctor names what an engine with experts does otherwise, under its own routes."""
    table(EXPERTS, tmp_path)
