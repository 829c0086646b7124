"""`mismatch-ext doctor` on real vLLM: faults of an engine, one and two at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.peers.doctor.faults import CONFIG, TWO, WEIGHTS, table

pytestmark = [pytest.mark.nightly, pytest.mark.engine, pytest.mark.timeout(1500)]


def test_other_configurations_are_named(tmp_path: Path) -> None:
    """The doctor names what an engine, or a trainer, reads from another configuration, with its value."""
    table(CONFIG, tmp_path)


def test_other_weights_and_caches_are_named(tmp_path: Path) -> None:
    """The doctor names other weights, their tensor, layer or checkpoint, and caches and dtypes."""
    table(WEIGHTS, tmp_path)


def test_two_faults_at_once_are_named(tmp_path: Path) -> None:
    """The doctor names two faults at once, or the first of them and what it leaves."""
    table(TWO, tmp_path)
