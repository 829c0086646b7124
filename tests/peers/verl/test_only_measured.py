"""A config that does not act, in verl: its engine is stock's to the last bit, and a check that fails is named."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.peers.scenarios import Run, named

if TYPE_CHECKING:
    from tests.peers.verl.in_process import scenarios_only_measured as scenarios
else:
    scenarios = named("tests.peers.verl.in_process.scenarios_only_measured")


@pytest.mark.numeric
def test_the_engine_is_verls_bit_for_bit(run: Run, moe: Path) -> None:
    found = run(scenarios.full, model=moe).expect()
    assert found["measured"] == found["verl"] and found["verl"]["grad_norm"][0] > 0


@pytest.mark.numeric
def test_a_scaler_that_has_disabled_itself_is_named_and_stays(run: Run, moe: Path) -> None:
    found = run(scenarios.half, model=moe).expect()
    failed = found.pop("failed")
    assert found["measured"] == found["verl"] and found["verl"]["scaler"] == "ShardedGradScaler"
    assert [one["check"] for one in failed] == ["loss_scaler"]
    assert "has disabled itself" in failed[0]["message"]
