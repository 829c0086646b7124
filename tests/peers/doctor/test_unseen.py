"""The doctor on 45 faults that it was not written for, and on clean set-ups: no wrong name, no false "Clean", nobody accused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from mismatch_ext.doctor.evidence import Block

pytestmark = [pytest.mark.nightly, pytest.mark.engine, pytest.mark.timeout(5400)]
# What the doctor of 25 November said, with the judgements that were made by hand then.
BEFORE = [
    ("01a", "explained", {"rope_theta": 1.01}, None, "over-claimed"),
    ("03a", "explained", {"temperature": 0.981, "stale_layer": 2}, None, "right name"),
    ("03b", "explained", {"temperature": 0.981}, None, "over-claimed"),
    ("05c", "partly", {"rope_theta": 0.65}, None, "wrong name"),
    ("08a", "explained", {"top_p": 0.889}, None, "over-claimed"),
    ("08b", "explained", {"min_p": 0.0656}, None, "wrong name"),
    ("08c", "partly", {"temperature": 0.937}, None, "partly, honest"),
    ("10a", "clean", {}, None, "false clean"),
    ("12d", "unexplained", {}, None, "unexplained, honest"),
    ("12e", "clean", {}, None, "missed"),
    ("14b", "partly", {"missing_first": 1}, None, "wrong name"),
    ("15a", "unexplained", {}, (2, "attention"), "right place, unexplained"),
    ("15a", "unexplained", {}, (1, "attention"), "wrong name"),
    ("17a", "clean", {}, None, "below rounding"),
    ("13a", "unexplained", {}, None, "accused"),
]


@pytest.mark.parametrize(("number", "verdict", "named", "at", "judgement"), BEFORE)
def test_the_judge_agrees_with_a_reader(
    number: str, verdict: str, named: dict[str, float], at: tuple[int, str] | None, judgement: str
) -> None:
    """The judge calls what the doctor said before as a reader did, and a wrong place a wrong name."""
    from tests.peers.doctor.unseen import CLEAN, FAULTS, judged

    causes = [SimpleNamespace(key=key, parameter=value, said="") for key, value in named.items()]
    blocks = [] if at is None else [Block(layer=at[0], kind=at[1], error=1.0, own=0.1)]
    found = SimpleNamespace(verdict=verdict, causes=causes, blocks=blocks, notes=(), unexplained=1e-3)
    assert judged((FAULTS | CLEAN)[number], found) == judgement


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
