"""Bad rows in whole runs of verl's own trainer: what goes on, what is counted, and what ends a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mismatch_ext.log_reading import read_run
from tests.models import tiny_model
from tests.peers.death import plain
from tests.peers.verl.cpu.faults import FAULT
from tests.peers.verl.main_ppo import VerlRun, dtypes, run_verl

pytestmark = pytest.mark.nightly

R3 = "+mismatch.routing.mode=R3"
ALLOWED = "+mismatch.monitor={weight_sync:error,max_bad_rows:1}"


def ran(work: Path, *overrides: str, model: Path, fault: str) -> VerlRun:
    settings = [*dtypes("float32"), *overrides, "trainer.save_freq=3"]
    return run_verl(work, settings, model=model, plugin=True, timeout=900, env={FAULT: fault})


def parameters(folder: Path, step: int) -> Any:
    name = f"checkpoints/global_step_{step}/actor/model_world_size_1_rank_0.pt"
    return plain(torch.load(folder / name, weights_only=False))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[VerlRun, Path]]:
    """Return a run with bad rows, and one in which the same rows have loss weight 0."""
    work = tmp_path_factory.mktemp("bad")
    model = tiny_model("dense", work / "model")
    faults = {"bad": "bad_answers@1", "weightless": "weightless_answers@1"}
    return {name: (ran(work / name, ALLOWED, model=model, fault=fault), work / name) for name, fault in faults.items()}


def test_a_quarter_of_the_rows_is_bad_and_the_parameters_are_those_of_loss_weight_0(
    pair: dict[str, tuple[VerlRun, Path]],
) -> None:
    (bad, folder), (weightless, other) = pair["bad"], pair["weightless"]
    steps = bad.expect()
    reasons = {"rollout_logprobs": 3, "weight_version": 1}
    assert {reason: steps[0][f"mismatch/bad_rows/{reason}"] for reason in reasons} == reasons
    assert [sum(step[f"mismatch/bad_rows/{reason}"] for reason in reasons) for step in steps[1:]] == [0, 0]
    # Rows that are bad are left out of what is measured.
    assert steps[0]["mismatch/tokens"] < weightless.expect()[0]["mismatch/tokens"]
    assert [step["actor/grad_norm"] for step in steps] == [step["actor/grad_norm"] for step in weightless.steps]
    assert parameters(folder, 3) == parameters(other, 3)
    assert "Their loss weight is 0; the run goes on." in bad.log


def test_too_many_bad_rows_end_an_acting_run_after_the_step_with_a_checkpoint(tmp_path: Path) -> None:
    model = tiny_model("moe", tmp_path / "model")
    run = ran(tmp_path / "run", R3, model=model, fault="bad_answers@2")
    assert run.code == 0, run.log[-6000:]
    assert len(run.steps) == 2
    reasons = {"rollout_logprobs": 2, "routes": 1, "weight_version": 1}
    assert {reason: run.steps[1][f"mismatch/bad_rows/{reason}"] for reason in reasons} == reasons
    data = read_run(tmp_path / "run/checkpoints/mismatch")
    (event,) = [event for event in data.events if (event.name, event.level) == ("bad_rows", "error")]
    assert event.step == 2 and "4 of the 32 rows of steps 1 to 2 were bad" in event.message
    assert (tmp_path / "run/checkpoints/latest_checkpointed_iteration.txt").read_text() == "2"
    assert list((tmp_path / "run/checkpoints/mismatch").glob("evidence-2*"))
