"""verl's own trainer, changed as a later release may be: every section runs in it, with today's numbers but for rounding."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.peers.trl.copies import copied, documented, with_argument
from tests.peers.verl.copies import HARMLESS, TOUCHED
from tests.peers.verl.main_ppo import VerlRun, cpu_environment, lasting, run_verl
from tests.peers.verl.test_main_ppo import EVERYTHING

pytestmark = [pytest.mark.nightly, pytest.mark.engine]

TIMES = ("timing_", "perf/", "actor/perf/", "mismatch/timing")


def everything(folder: Path) -> None:
    """Change a copy in every harmless way at once."""
    for change in (HARMLESS["a helper out of prepare_model_inputs"], documented(TOUCHED), with_argument(TOUCHED)):
        change(folder)


def test_a_whole_run_on_a_changed_copy_warns_and_has_the_same_numbers(moe: Path, tmp_path: Path) -> None:
    copy = copied(tmp_path / "copy", everything, "verl", "0.9.2")

    def ran(name: str, *path: str) -> VerlRun:
        work = tmp_path / name
        searched = os.pathsep.join([*path, cpu_environment(work)["PYTHONPATH"]])
        return run_verl(work, [*EVERYTHING, *lasting(2)], model=moe, plugin=True, env={"PYTHONPATH": searched})

    def numbers(run: VerlRun) -> list[dict[str, float]]:
        return [{k: v for k, v in step.items() if not k.startswith(TIMES)} for step in run.expect(2)]

    stock, newer = ran("stock"), ran("newer", str(copy))
    assert "verl 0.9.2" in newer.log and "verl 0.9.2" not in stock.log
    for step, of_today in zip(numbers(newer), numbers(stock), strict=True):
        # vLLM rounds with the requests that happen to be computed together.
        assert step == pytest.approx(of_today, rel=1e-3, abs=1e-3)
