"""`mismatch-ext doctor` on real vLLM: faults of requests and prompts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.evidence.doctor_faults import HIDDEN, PROMPT, REQUESTS, table
from tests.evidence.pages import slice_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1500)]
COMMAND = f"make evidence SLICE={slice_of('doctor_sampling')}"


def test_faults_of_requests_are_named(evidence: Callable[..., None], tmp_path: Path) -> None:
    """The doctor names sampling settings that the trainer does not know of, with their values, hidden ones too."""
    evidence("doctor_sampling", table(REQUESTS | HIDDEN, tmp_path), command=COMMAND)


def test_other_prompts_are_named(evidence: Callable[..., None], tmp_path: Path) -> None:
    """The doctor names what an engine's prompts have more or less than the trainer's."""
    evidence("doctor_prompts", table(PROMPT, tmp_path), command=COMMAND)
