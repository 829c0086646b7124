"""Where a CPU engine cannot say what its routers chose: that is refused by name, and all else runs.

Only the stack `trl-oldest` has such an engine, and it names this file (`tests/stacks.py`). No other run collects it, because its
name does not begin with `test_`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mismatch_ext.log_reading import read_run
from tests.peers.scenarios import Run, named
from tests.peers.trl.test_everything import EVERYTHING, SAVING

if TYPE_CHECKING:
    from tests.peers.trl import scenarios_everything as scenarios
else:
    scenarios = named("tests.peers.trl.scenarios_everything")


def test_routes_of_the_engine_are_refused_by_name(run: Run, moe: Path, tmp_path: Path) -> None:
    ran = run(scenarios.everything, model=moe, out=tmp_path, block={"routing": {"mode": "R3"}}, max_steps=1)
    assert ran.code != 0 and "mismatch.routing.R3 does not work on a CPU" in ran.stderr, ran.stderr[-2000:]
    assert "mode: R2" in ran.stderr


def test_every_other_section_is_active_in_one_run(run: Run, dense: Path, tmp_path: Path) -> None:
    block = {name: section for name, section in EVERYTHING.items() if name != "routing"}
    ran = run(scenarios.everything, model=dense, out=tmp_path, block=block, model_init_kwargs=None, **SAVING)
    history = ran.expect()["history"]
    for section in ("precision", "correction", "lr", "kl", "alarms"):
        assert f"\n  {section}" in ran.stdout, ran.stdout
    assert [entry["mismatch/lr_multiplier"] for entry in history] == [1.0, 1.0, 0.5, 0.5]
    last = history[-1]
    assert last["mismatch/loss_scale"] == 4096 and 0 < last["mismatch/k3_kl"] < 1e-4
    assert "mismatch/rollout_rs_seq_masked_fraction" in last
    assert len({entry["mismatch/kl_coef"] for entry in history}) > 1
    (alarm,) = [event for event in read_run(tmp_path / "mismatch").events if event.name == "alarm"]
    assert (alarm.step, alarm.data["metric"]) == (3, "reward")
