"""Bad rows in whole runs of each of verl's modes: a step with them is bit for bit that of loss weight 0 in their place.

Asynchronous modes sample other answers in every run. So a row is spoiled after its batch is drawn, and the driver takes the
step again from the same checkpoint, with the row good and its loss weight 0, and once more with the row good.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from mismatch_ext.log_reading import read_run
from tests.models import tiny_model
from tests.peers.verl.cpu.twice import TWICE
from tests.peers.verl.main_ppo import VerlRun, dtypes, lasting, run_verl
from tests.peers.verl.modes import COLOCATE, SEPARATE

pytestmark = pytest.mark.nightly

ALLOWED = "+mismatch.monitor={weight_sync:error,max_bad_rows:1}"
REASON_OF = {
    "rollout": "rollout_logprobs",
    "old": "old_logprobs",
    "reference": "old_logprobs",
    "version": "weight_version",
    "tokens": "tokens",
    "routes": "routes",
    "mask": "mask",
}
Steps = dict[int, dict[int, str]]


def taken_twice(
    work: Path, steps: Steps, *overrides: str, model: str = "dense", count: int = 3
) -> tuple[VerlRun, list[Any]]:
    """Run verl with steps that are taken several times; return the run, and what each of these steps has left."""
    file = work / "twice.jsonl"
    settings = [*dtypes("float32"), ALLOWED, *overrides, *lasting(count)]
    asked = json.dumps({"steps": steps, "file": str(file)})
    run = run_verl(
        work, settings, model=tiny_model(model, work / "model"), plugin=True, timeout=500, env={TWICE: asked}
    )
    run.expect(count)
    return run, [json.loads(line) for line in file.read_text().splitlines()]


def check_steps(run: VerlRun, left: list[Any], steps: Steps, work: Path) -> None:
    """Check that bad rows are found, counted and kept, and that the step is that of the rows with loss weight 0."""
    assert [one["step"] for one in left] == list(steps)
    events = [event for event in read_run(work / "checkpoints/mismatch").events if event.name == "bad_rows"]
    for one, kinds in zip(left, steps.values(), strict=True):
        assert {int(row): fault[0] for row, fault in one["bad"].items()} == {
            row: REASON_OF[kind] for row, kind in kinds.items()
        }
        weights, norms = one["weights"], one["norms"]
        assert norms["spoiled"] == norms["weightless"] and weights["spoiled"] == weights["weightless"], one
        # The rows would have had a part in the step, and the step has moved the weights.
        assert (
            norms["spoiled"] != norms["whole"] and len({weights[name] for name in ("before", "spoiled", "whole")}) == 3
        )
        for reason, rows in Counter(REASON_OF[kind] for kind in kinds.values()).items():
            assert run.steps[one["step"] - 1][f"mismatch/bad_rows/{reason}"] == rows
            (event,) = [event for event in events if event.step == one["step"] and event.data["reason"] == reason]
            assert event.data["rows"] == rows and "Their loss weight is 0; the run goes on." in event.message
    assert list((work / "checkpoints/mismatch").glob("evidence-*"))


@pytest.mark.parametrize("mode", [COLOCATE, SEPARATE], ids=["colocate", "separate"])
def test_asynchronous_steps_with_bad_rows_are_those_of_loss_weight_0(mode: tuple[str, ...], tmp_path: Path) -> None:
    steps: Steps = {2: {1: "rollout"}, 3: {0: "rollout", 2: "old", 4: "version", 5: "tokens", 7: "reference"}}
    run, left = taken_twice(tmp_path, steps, *mode)
    check_steps(run, left, steps, tmp_path)
