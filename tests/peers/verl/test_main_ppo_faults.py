"""Faults whose verdict `tests/peers/verl/{test_reports,test_loss}.py` hold without a run, in whole runs of verl's own trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models import tiny_model
from tests.peers.verl.cpu.faults import FAULT, MESSAGE
from tests.peers.verl.main_ppo import dtypes, run_verl

pytestmark = pytest.mark.nightly

ACTING = "+mismatch.monitor.weight_sync=error"
"""The smallest config that ends a run in which a check fails."""


@pytest.mark.parametrize("where", ["worker", "rollout"])
def test_a_package_that_fails_in_one_process_ends_the_run_before_its_first_step(where: str, tmp_path: Path) -> None:
    model = tiny_model("moe", tmp_path / "model")
    overrides = [*dtypes("float32"), ACTING]
    env = {FAULT: f"no_plugin_in_the_{where}"}
    run = run_verl(tmp_path / "run", overrides, model=model, plugin=True, timeout=600, env=env)
    run.expect_failure()
    assert f"{MESSAGE}: mismatch_ext.adapters.verl" in run.log
