"""docs/verl.md's whole command for two CPU cores, as it is pasted."""

from __future__ import annotations

import re

import pytest

from mismatch_ext.log_reading import read_run
from tests.commands import ROOT, shell

pytestmark = [pytest.mark.engine, pytest.mark.nightly]


def test_the_commands_of_the_page_measure_two_steps_and_close_the_gap() -> None:
    page = (ROOT / "docs/verl.md").read_text(encoding="utf-8")
    measuring, command = re.findall(r"^ +(python -m examples\.verl_cpu.*)$", page, flags=re.M)
    gap = r"logp_abs_diff_mean ([\d.e+-]+)"
    assert min(map(float, re.findall(gap, shell(measuring, timeout=600)))) > 1e-4
    said = shell(command, timeout=600)
    assert max(map(float, re.findall(gap, said))) < 1e-6
    assert "step 2: " in said and "mismatch-ext report" in said, said
    work = ROOT / "runs/verl_cpu"
    run = read_run(work / "checkpoints/mismatch")
    assert [step.step for step in run.steps] == [1, 2] and run.ending.status == "completed"
