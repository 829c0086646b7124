"""The doctor on 45 faults that it was not written for, and on clean set-ups: no wrong name, no false "Clean", nobody accused."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = [pytest.mark.nightly, pytest.mark.engine, pytest.mark.timeout(5400)]


def test_no_clean_run_is_accused(tmp_path: Path) -> None:
    """The doctor names nothing on clean set-ups: dense and with experts, three dtypes, a window, an adapter, a log."""
    from tests.peers.doctor.unseen import CLEAN, CLEAR, table

    rows = list(table(CLEAN, tmp_path))
    assert all(row.judged == CLEAR for row in rows), "\n".join(map(str, rows))


def test_no_name_is_wrong_and_most_faults_are_found(tmp_path: Path) -> None:
    """Of 45 faults none gets a wrong name, an "Explained" beside a second fault or a "Clean", and 36 are named or placed."""
    from tests.peers.doctor.unseen import BAD, FAULTS, RIGHT, table

    rows = list(table(FAULTS, tmp_path))
    printed = "\n".join(map(str, rows))
    print(printed)
    assert len(rows) == 45 and not [row for row in rows if row.judged in BAD], printed
    assert sum(row.judged in RIGHT for row in rows) >= 36, printed
