"""What goes wrong in verl's processes ends in an error that says what it was, and never in a hang."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mismatch_ext.rundata import read_run
from tests.models import tiny_model
from tests.peers.verl.cpu.faults import FAULT, MESSAGE
from tests.peers.verl.main_ppo import TIMED_OUT, VerlRun, dtypes, run_verl

pytestmark = pytest.mark.engine

R3 = "+mismatch.routing.mode=R3"


def failed(
    work: Path,
    *overrides: str,
    model: Path,
    fault: str | None = None,
    vllm_version: str | None = None,
    timeout: float = 300,
) -> VerlRun:
    """Run with a block and a fault, and return what must not have succeeded nor hung."""
    run = run_verl(
        work,
        [*dtypes("float32"), *overrides],
        model=model,
        plugin=True,
        timeout=timeout,
        env={} if fault is None else {FAULT: fault},
        vllm_version=vllm_version,
    )
    assert run.code not in (0, TIMED_OUT), f"exit code {run.code} after {run.seconds:.0f} s:\n{run.log[-6000:]}"
    return run


def test_a_version_of_vllm_that_was_not_tested(dense: Path, tmp_path: Path) -> None:
    run = failed(tmp_path, "+mismatch.monitor={}", model=dense, vllm_version="0.29.0")
    assert "PeerVersionError: vllm 0.29.0" in run.log and "is outside the supported range" in run.log
    assert "TaskRunner" not in run.log  # before Ray started anything


@pytest.mark.parametrize("fault", ["no_plugin_in_the_worker", "no_plugin_in_the_rollout"])
def test_the_package_fails_in_one_process_only(dense: Path, tmp_path: Path, fault: str) -> None:
    run = failed(tmp_path, "+mismatch.monitor={}", model=dense, fault=fault)
    assert f"{MESSAGE}: mismatch_ext.adapters.verl" in run.log
    assert run.steps == []


def test_an_engine_that_does_not_record_its_routing(moe: Path, tmp_path: Path) -> None:
    run = failed(tmp_path, R3, model=moe, fault="no_routed_experts")
    assert "EngineError" in run.log and "does not record routing" in run.log
    assert run.steps == []


def test_a_vocabulary_larger_than_the_tokenizer(tmp_path: Path) -> None:
    model = tiny_model("dense", tmp_path / "model", extra_vocabulary=48)
    run = failed(tmp_path / "run", "+mismatch.monitor={}", model=model)
    assert "ConfigError" in run.log and "Resize the model's embeddings to the tokenizer" in run.log
    assert run.steps == []


def test_a_logprob_that_is_not_a_number(dense: Path, tmp_path: Path) -> None:
    run = failed(tmp_path, "+mismatch.monitor={}", model=dense, fault="nonfinite_logprob")
    assert "NonFiniteLogprobError" in run.log and "token 1: the engine reported log-probability nan" in run.log
    assert run.steps == []


def test_one_answer_without_its_routing(moe: Path, tmp_path: Path) -> None:
    run = failed(tmp_path, R3, model=moe, fault="lost_routes")
    # By prompt, answer and turn: the fault strikes the second answer of a prompt.
    assert re.search(r"RoutingError: 1 of \d+ rollouts of step 1 came without routing \(\S+_1_0\)", run.log)
    assert run.steps == []


def test_a_hang_is_ended_and_what_was_saved_is_there(dense: Path, tmp_path: Path) -> None:
    # Longer than a busy machine takes to start servers.
    overrides = ("+mismatch.monitor.stall_timeout=150", "trainer.save_freq=1")
    run = failed(tmp_path, *overrides, model=dense, fault="failing_weight_update", timeout=500)
    assert "StallError" in run.log and "updating the rollout's weights after step 1" in run.log
    saved = tmp_path / "checkpoints/global_step_1"
    assert (saved / "mismatch.json").is_file() and list((saved / "actor").glob("model_world_size_1_rank_0.pt"))
    # A run without the fault goes on from there, in the same metrics file.
    resuming = ("+mismatch.monitor={}", "trainer.resume_mode=auto")
    steps = run_verl(tmp_path, [*dtypes("float32"), *resuming], model=dense, plugin=True).expect(2)
    assert [step["training/global_step"] for step in steps] == [2, 3]
    data = read_run(tmp_path / "checkpoints/mismatch")
    assert [step.step for step in data.steps][-2:] == [2, 3] and [end.status for end in data.ends] == [
        "failed",
        "completed",
    ]
    assert "resumed" in [event.name for event in data.events]
