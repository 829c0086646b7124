"""`mismatch-ext doctor` on real vLLM: clean runs, and faults of requests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.evidence.doctor_faults import CLEAN, CLEAN_EXPERTS, HIDDEN, REQUESTS, table
from tests.evidence.pages import slice_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1500)]
COMMAND = f"make evidence SLICE={slice_of('doctor_clean')}"


def test_nothing_is_named_on_clean_runs(evidence: Callable[..., None], tmp_path: Path) -> None:
    """The doctor names nothing on clean runs of a dense model: seeds, dtypes, lengths, a temperature on both sides."""
    evidence("doctor_clean", table(CLEAN, tmp_path), command=COMMAND)


def test_nothing_is_named_on_clean_runs_with_experts(evidence: Callable[..., None], tmp_path: Path) -> None:
    """The doctor names nothing on clean runs of a model with experts: seeds, dtypes, a temperature on both sides."""
    evidence("doctor_clean_experts", table(CLEAN_EXPERTS, tmp_path), command=COMMAND)


def test_faults_of_requests_are_named(evidence: Callable[..., None], tmp_path: Path) -> None:
    """The doctor names sampling settings and prompts that the trainer does not know of, with their values."""
    evidence("doctor_sampling", table(REQUESTS, tmp_path), command=COMMAND)


def test_faults_that_log_probabilities_hide_are_named(evidence: Callable[..., None], tmp_path: Path) -> None:
    """The doctor names sampling that reported log-probabilities hide."""
    evidence("doctor_hidden", table(HIDDEN, tmp_path), command=COMMAND)
