"""`mismatch-ext doctor --engine sglang` on real SGLang: clean runs, faults of requests, and faults of the engine itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.peers.engines.sglang_environment import HELD, MAIN, run_sglang
from tests.peers.scenarios import named

scenarios = named("tests.peers.doctor.faults_sglang")

pytestmark = [pytest.mark.nightly, pytest.mark.engine, pytest.mark.timeout(1500)]


def found(runs: str, folder: Path) -> dict[str, str]:
    """Return what SGLang's faults were called; no compiled kernel stood in for torch's."""
    result = run_sglang(scenarios.named, HELD or MAIN, folder, runs=runs, out=str(folder))
    assert result["stub"]["called"] == 0
    table: dict[str, str] = result["table"]
    return table


def test_faults_of_requests_to_sglang_are_named(tmp_path: Path) -> None:
    """With SGLang the doctor names other sampling settings and prompts, those that its reports hide too, and no clean run."""
    found("requests", tmp_path)


def test_faults_of_sglang_are_named(tmp_path: Path) -> None:
    """With SGLang the doctor names another configuration, other weights, and experts of another weight."""
    found("engine", tmp_path)
