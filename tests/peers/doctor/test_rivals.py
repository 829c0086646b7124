"""`benchmarks/rivals.py` with our doctor alone: what its table says of us holds."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = [pytest.mark.nightly, pytest.mark.engine, pytest.mark.timeout(1800)]


def test_planted_faults_are_named_from_logs_by_the_command(tmp_path: Path) -> None:
    """The command names a sampling setting, both masks and responses that were cut, and nothing on a clean log."""
    from benchmarks.rivals import OURS, of_logs

    faults = ("top_p 0.88", "tool mask a token late", "mask starts a token late", "responses cut at 16 tokens")
    rows = list(of_logs(["clean", *faults], tmp_path, tmp_path, (OURS,)))
    assert [(row["fault"], row["verdict"]) for row in rows] == [(name, "right") for name in ("clean", *faults)]


def test_the_faults_of_the_first_comparison_are_named(tmp_path: Path) -> None:
    """The command names each from its log."""
    from benchmarks.rivals import FIRST, OURS, of_logs

    rows = {row["fault"]: row for row in of_logs(FIRST, tmp_path, tmp_path, (OURS,))}
    assert {name: row["verdict"] for name, row in rows.items()} == dict.fromkeys(FIRST, "right"), rows
