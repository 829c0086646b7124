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
ALLOWED = "+mismatch.monitor.max_bad_rows=1"
REASONS = {"rollout_logprobs": 2, "routes": 1, "weight_version": 1}
"""Of the 16 answers of a step, how many the fault `bad_answers` makes bad, by the reason."""


def ran(work: Path, *overrides: str, model: Path, fault: str) -> VerlRun:
    settings = [*dtypes("float32"), *overrides, "trainer.save_freq=3"]
    return run_verl(work, settings, model=model, plugin=True, timeout=900, env={FAULT: fault})


def parameters(folder: Path, step: int) -> Any:
    name = f"checkpoints/global_step_{step}/actor/model_world_size_1_rank_0.pt"
    return plain(torch.load(folder / name, weights_only=False))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[VerlRun, Path]]:
    """Return a run with bad rows, one in which the same rows have loss weight 0, and one that allows no bad rows."""
    work = tmp_path_factory.mktemp("bad")
    model = tiny_model("moe", work / "model")
    cases = {
        "bad": ([R3, ALLOWED], "bad_answers@1"),
        "weightless": ([R3, ALLOWED], "weightless_answers@1"),
        "ended": ([R3], "bad_answers@2"),
    }
    return {
        name: (ran(work / name, *overrides, model=model, fault=fault), work / name)
        for name, (overrides, fault) in cases.items()
    }


def test_a_quarter_of_the_rows_is_bad_and_the_parameters_are_those_of_loss_weight_0(
    runs: dict[str, tuple[VerlRun, Path]],
) -> None:
    (bad, folder), (weightless, other) = runs["bad"], runs["weightless"]
    steps = bad.expect()
    assert {reason: steps[0][f"mismatch/bad_rows/{reason}"] for reason in REASONS} == REASONS
    assert [sum(step[f"mismatch/bad_rows/{reason}"] for reason in REASONS) for step in steps[1:]] == [0, 0]
    # Rows that are bad are left out of what is measured.
    assert steps[0]["mismatch/tokens"] < weightless.expect()[0]["mismatch/tokens"]
    assert [step["actor/grad_norm"] for step in steps] == [step["actor/grad_norm"] for step in weightless.steps]
    assert parameters(folder, 3) == parameters(other, 3)
    assert "4 bad rows" not in bad.log and "Their loss weight is 0; the run goes on." in bad.log


def test_too_many_bad_rows_end_an_acting_run_after_the_step_with_a_checkpoint(
    runs: dict[str, tuple[VerlRun, Path]],
) -> None:
    run, folder = runs["ended"]
    assert run.code == 0, run.log[-6000:]
    assert len(run.steps) == 2
    data = read_run(folder / "checkpoints/mismatch")
    (event,) = [event for event in data.events if (event.name, event.level) == ("bad_rows", "error")]
    assert event.step == 2 and "4 of the 32 rows of the last 20 steps were bad" in event.message
    assert (folder / "checkpoints/latest_checkpointed_iteration.txt").read_text() == "2"
    assert list((folder / "checkpoints/mismatch").glob("evidence-2*"))
