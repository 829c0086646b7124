"""Where a CPU engine cannot say what its routers chose: that is refused by name, and all else runs.

Only the stack `trl-oldest` has such an engine, and it names this file (`tests/stacks.py`). No other run collects it, because its
name does not begin with `test_`.
"""

from __future__ import annotations

from pathlib import Path

from tests.peers.scenarios import Run, named

scenarios = named("tests.peers.trl.scenarios_everything")


def test_routes_of_the_engine_are_refused_by_name(run: Run, moe: Path, tmp_path: Path) -> None:
    ran = run(scenarios.everything, model=moe, out=tmp_path, block={"routing": {"mode": "R3"}}, max_steps=1)
    assert ran.code != 0 and "mismatch.routing.R3 does not work on a CPU" in ran.stderr, ran.stderr[-2000:]
    assert "mode: R2" in ran.stderr
