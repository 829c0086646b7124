"""What one failure does to the rest of a run with verl: an error of one rank's pass stays that rank's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tests.peers.scenarios import Run, named

if TYPE_CHECKING:
    from tests.peers.verl.in_process import scenarios_one_failure as failing
else:
    failing = named("tests.peers.verl.in_process.scenarios_one_failure")


def test_a_pass_that_fails_on_one_rank_fails_there_and_meets_no_other_rank(run: Run, moe: Path) -> None:
    first, second = run(failing.failing_pass_on_two, model=moe).expect()
    assert first == {"said": "out of memory", "shared": 2000.0}
    assert second == {"said": "the other rank's pass failed", "shared": 2000.0}
