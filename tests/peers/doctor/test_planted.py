"""`mismatch-ext doctor` on real vLLM: faults that are planted in requests and engines, and clean runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.peers.doctor.faults import GROUPS, Engines, examined, table

pytestmark = [pytest.mark.nightly, pytest.mark.engine, pytest.mark.timeout(1500)]


@pytest.mark.parametrize("group", [name for name in GROUPS if name != "UNKNOWN"])
def test_faults_are_named_with_their_values_and_no_clean_run_is(group: str, tmp_path: Path) -> None:
    table(GROUPS[group], tmp_path)


def test_what_is_not_on_the_list_has_no_name_but_a_place(tmp_path: Path) -> None:
    (planted,) = GROUPS["UNKNOWN"].values()
    engines = Engines()
    try:
        unknown = examined(planted, tmp_path, engines)
    finally:
        engines.end()
    assert not unknown.causes and unknown.verdict == "unexplained" and unknown.exit_status(1e-4) == 3
    worst = max(unknown.blocks, key=lambda block: block.error / block.own)
    assert (worst.layer, worst.kind) == (1, "mlp")
