"""`mismatch-ext doctor` on real vLLM: faults that were planted when it was done."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.evidence.doctor_faults import LATER, UNKNOWN, Engines, examined, said, table
from tests.evidence.pages import slice_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1500)]
COMMAND = f"make evidence SLICE={slice_of('doctor_later')}"


def test_faults_that_it_was_not_written_for(evidence: Callable[..., None], tmp_path: Path) -> None:
    """Of faults that were planted when it was done, the doctor names those on its list, and says what else is left."""
    found = table(LATER, tmp_path)
    engines = Engines()
    try:
        unknown = examined(UNKNOWN, tmp_path, engines)
    finally:
        engines.end()
    # What is not on the list has no name, but a place.
    assert not unknown.causes and unknown.verdict == "unexplained" and unknown.exit_status(1e-4) == 2
    worst = max(unknown.blocks, key=lambda block: block.error / block.own)
    assert (worst.layer, worst.kind) == (1, "mlp")
    found["noise in layer 1's down_proj"] = "; ".join((*said(unknown), *unknown.notes))
    evidence("doctor_later", found, command=COMMAND)
