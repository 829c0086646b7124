"""Rows that a run of TRL keeps when something goes wrong, and what the doctor says of them afterwards."""

from __future__ import annotations

import gzip
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from mismatch_ext.adapters import cli

from examples.arithmetic.shipped import FOLDER
from mismatch_ext.log_reading import read_run
from tests.peers.scenarios import Run, named

if TYPE_CHECKING:
    from tests.peers.trl import scenarios_evidence as scenarios
    from tests.peers.trl import scenarios_training as training
else:
    scenarios = named("tests.peers.trl.scenarios_evidence")
    training = named("tests.peers.trl.scenarios_training")

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
    assert kept[0]["provenance"]["sampling"]["temperature"] == 1.0  # what the engine was asked for
    assert {len(line["prompt_ids"]) + line["kept"]["left_pads"] for line in kept} == {
        max(len(line["prompt_ids"]) for line in kept)
    }
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


@pytest.mark.numeric
def test_stock_trl_that_is_measured_keeps_rows_too(run: Run, tmp_path: Path) -> None:
    """Its alarms are the built-in ones, which wait for three logs in a row."""
    files = run(scenarios.attached, model=MODEL, out=str(tmp_path)).expect()
    assert files == ["evidence-9.jsonl.gz", "metrics-000.jsonl"]
    kept = rows_of(tmp_path / "mismatch" / files[0])
    assert "k3_kl is" in kept[0]["kept"]["reason"] and all(len(line["trainer_logprobs"]) for line in kept)


def test_a_bad_row_is_kept_and_the_run_goes_on(run: Run, dense: Path, tmp_path: Path) -> None:
    found = run(training.nan_logprobs, model=dense, out=tmp_path).expect()
    assert len(found["history"]) == 5
    (first, *_) = rows_of(tmp_path / "mismatch/evidence-2.jsonl.gz")
    assert first["kept"]["row"] == 3 and first["rollout_logprobs"][1] is None
    assert "rollout 3, token 1 (id" in first["kept"]["reason"]
