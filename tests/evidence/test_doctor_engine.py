"""`mismatch-ext doctor` on real vLLM: faults of an engine, one and two at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.evidence.doctor_faults import CONFIG, TWO, WEIGHTS, table
from tests.evidence.pages import slice_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1500)]
COMMAND = f"make evidence SLICE={slice_of('doctor_engine')}"


def test_other_configurations_are_named(evidence: Callable[..., None], tmp_path: Path) -> None:
    """The doctor names what an engine, or a trainer, reads from another configuration, with its value."""
    evidence("doctor_engine", table(CONFIG, tmp_path), command=COMMAND)


def test_other_weights_and_caches_are_named(evidence: Callable[..., None], tmp_path: Path) -> None:
    """The doctor names other weights, their tensor, layer or checkpoint, and caches and dtypes."""
    evidence("doctor_weights", table(WEIGHTS, tmp_path), command=COMMAND)


def test_two_faults_at_once_are_named(evidence: Callable[..., None], tmp_path: Path) -> None:
    """The doctor names two faults at once, or the first of them and what it leaves."""
    evidence("doctor_two", table(TWO, tmp_path), command=COMMAND)
