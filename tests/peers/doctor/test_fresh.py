"""The doctor on 15 faults of someone who has not read it: no wrong name, no over-claim, no false "Clean"."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = [pytest.mark.nightly, pytest.mark.engine, pytest.mark.timeout(3600)]


def test_no_fault_that_nobody_had_in_mind_gets_a_wrong_name(tmp_path: Path) -> None:
    """Of 15 faults and a clean run the doctor misjudges none."""
    from tests.peers.doctor.fresh import CHECKED
    from tests.peers.doctor.unseen import BAD, table

    rows = list(table(CHECKED, tmp_path))
    printed = "\n".join(map(str, rows))
    print(printed)
    assert not [row for row in rows if row.judged in BAD], printed
