"""`mismatch-ext doctor` on real vLLM: faults that were planted when it was done."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.peers.doctor.faults import LATER, UNKNOWN, Engines, examined, table

pytestmark = [pytest.mark.nightly, pytest.mark.engine, pytest.mark.timeout(1500)]


def test_faults_that_it_was_not_written_for(tmp_path: Path) -> None:
    """Of faults that were planted when it was done, the doctor names those on its list, and says what else is left."""
    table(LATER, tmp_path)
    engines = Engines()
    try:
        unknown = examined(UNKNOWN, tmp_path, engines)
    finally:
        engines.end()
    # What is not on the list has no name, but a place.
    assert not unknown.causes and unknown.verdict == "unexplained" and unknown.exit_status(1e-4) == 3
    worst = max(unknown.blocks, key=lambda block: block.error / block.own)
    assert (worst.layer, worst.kind) == (1, "mlp")
