"""Rows that a run of TRL keeps when something goes wrong, and what the doctor says of them afterwards."""

from __future__ import annotations

import gzip
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from mismatch_ext.adapters import cli

from examples.arithmetic.shipped import FOLDER
from mismatch_ext.log_reading import read_run
from tests.peers.scenarios import Run, named

scenarios = named("tests.peers.trl.scenarios_evidence")

pytestmark = pytest.mark.engine
MODEL = str(FOLDER / "dense")


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).decode().splitlines()]


@pytest.mark.numeric
def test_a_stopped_run_leaves_rows_and_a_checkpoint_by_which_the_cause_is_named(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run saves every 10 steps and stops at step 7: the batch was scored one step before that checkpoint."""
    alarms = {"logp_abs_diff_mean": {"above": 0.01, "patience": 1, "action": "stop"}}
    block = {"monitor": {"alarms": alarms, "default_alarms": False}}
    ran = run(scenarios.faulty, model=MODEL, out=tmp_path, block=block)
    ran.expect()
    file, checkpoint = tmp_path / "mismatch/evidence-7.jsonl.gz", tmp_path / "checkpoint-7"
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-7"]
    kept = rows_of(file)
    assert {line["step"] for line in kept} == {6} and [line["kept"]["chosen"] for line in kept].count("worst") == 8
    assert all(set(line) >= {"trainer_logprobs", "rollout_logprobs", "response_mask", "provenance"} for line in kept)
    # The command that the run has printed, and that its summary repeats.
    (*_, event) = [event for event in read_run(file.parent).events if event.name == "evidence"]
    command = event.data["command"]
    assert f"the alarm that stops training saved {checkpoint}" in event.message
    assert f"evidence   {command}" in ran.stdout
    words = shlex.split(command)
    assert cli.main([*words[1:], "--quick"]) == 1
    found = json.loads((file.parent / "doctor_step_7/doctor.json").read_text(encoding="utf-8"))
    (cause,) = found["causes"]
    assert (cause["key"], round(cause["parameter"], 2), found["verdict"]) == ("temperature", 1.25, "explained")
    assert cause["remedy"]["trl"] and "Explained" in capsys.readouterr().out
