"""`mismatch-ext doctor` on real vLLM: faults of requests and prompts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.peers.doctor.faults import HIDDEN, PROMPT, REQUESTS, table

pytestmark = [pytest.mark.nightly, pytest.mark.engine, pytest.mark.timeout(1500)]


def test_faults_of_requests_are_named(tmp_path: Path) -> None:
    """The doctor names sampling settings that the trainer does not know of, with their values, hidden ones too."""
    table(REQUESTS | HIDDEN, tmp_path)


def test_other_prompts_are_named(tmp_path: Path) -> None:
    """The doctor names what an engine's prompts have more or less than the trainer's."""
    table(PROMPT, tmp_path)
