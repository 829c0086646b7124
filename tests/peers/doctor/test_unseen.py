"""The doctor on faults that it was not written for, and on clean set-ups: no wrong name, no false "Clean", nobody accused."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = [pytest.mark.nightly, pytest.mark.engine, pytest.mark.timeout(5400)]


def test_no_clean_run_is_accused(tmp_path: Path) -> None:
    """The doctor names nothing on clean set-ups: dense and with experts, two dtypes, a window, a log."""
    from tests.peers.doctor.unseen import CLEAN, CLEAR, table

    rows = table(CLEAN, tmp_path)
    assert all(judgement == CLEAR for judgement, _ in rows.values()), rows


def test_no_name_is_wrong_and_most_faults_are_found(tmp_path: Path) -> None:
    """No fault gets a wrong name, an "Explained" beside a second fault or a "Clean", and four of five are named or placed."""
    from tests.peers.doctor.unseen import BAD, FAULTS, RIGHT, table

    rows = table(FAULTS, tmp_path)
    print(rows)
    assert not [row for row in rows.items() if row[1][0] in BAD], rows
    assert sum(judgement in RIGHT for judgement, _ in rows.values()) >= 0.8 * len(FAULTS), rows
