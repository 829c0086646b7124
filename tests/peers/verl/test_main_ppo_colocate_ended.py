"""verl's colocate_async, ended while answers are in flight: by an alarm, a fault, a kill and a number that is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models import tiny_model
from tests.peers.verl.ended import check_endings, endings
from tests.peers.verl.modes import COLOCATE

pytestmark = pytest.mark.nightly


def test_colocate_async_goes_on_from_every_ending(tmp_path: Path) -> None:
    """In colocate_async, a run that is stopped, loses routes, is killed or gets NaN goes on from what was saved."""
    found = endings(tmp_path / "run", COLOCATE, tiny_model("moe", tmp_path / "moe"))
    check_endings(found, tmp_path / "run")
