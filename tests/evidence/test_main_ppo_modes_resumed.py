"""verl's asynchronous modes, ended while answers are in flight: by lost routes, a number that is none, and a kill."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mismatch_ext.rundata import read_run
from tests.models import tiny_model
from tests.peers.verl.cpu.faults import FAULT
from tests.peers.verl.main_ppo import KILLED, VerlRun, run_verl
from tests.peers.verl.modes import COLOCATE, SEPARATE
from tests.peers.verl.test_main_ppo import FLOAT32_K3

BLOCK = ("+mismatch.precision.dtype=float32", "+mismatch.routing={mode:R3,agreement_rate:1.0}", "+mismatch.lr.period=2")
RESUMED = ("trainer.resume_mode=auto", "trainer.total_training_steps=4")


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("moe", tmp_path_factory.mktemp("models") / "moe")


def resumed(work: Path, mode: tuple[str, ...], model: Path, after: int) -> VerlRun:
    """Go on from a checkpoint that an ended run has left, with what was in flight, and check what it trains."""
    run = run_verl(work, [*BLOCK, *mode, *RESUMED], model=model, plugin=True)
    steps = [step["training/global_step"] for step in run.steps]
    assert run.code == 0 and steps[-(4 - after) :] == list(range(after + 1, 5)), (steps, run.log[-6000:])
    assert "training prompt groups from TransferQueue" in run.log and "Restored 0 training" not in run.log
    data = read_run(work / "checkpoints/mismatch")
    # A kill between a checkpoint and its step's log costs that log, which the run says.
    lost = [after] if any(event.name == "lost_log" for event in data.events) else []
    logged = {step.step: step.metrics for step in data.steps}
    assert sorted([*logged, *lost]) == [1, 2, 3, 4] and data.ends[-1].status == "completed"
    assert not [event for event in data.events if event.name == "weight_sync"]
    assert all(metrics["mismatch/lr_multiplier"] == (1.0 if step < 3 else 0.5) for step, metrics in logged.items())
    return run


def test_a_failure_while_answers_are_in_flight_is_rescued_and_resumed(moe: Path, tmp_path: Path) -> None:
    """In colocate_async, routes that are lost end the run, and it goes on from what was saved."""
    failed = run_verl(
        tmp_path,
        [*BLOCK, *COLOCATE, "trainer.total_training_steps=4"],
        model=moe,
        plugin=True,
        env={FAULT: "lost_routes@2"},
    )
    trained = len(failed.expect_failure(None))
    assert 0 < trained < 4 and "came without routing" in failed.log
    assert "The checkpoint holds the prompts and answers in flight" in failed.log
    assert (tmp_path / f"checkpoints/global_step_{trained}/transfer_queue/metadata.json").is_file()
    (tmp_path / "metrics.jsonl").unlink()
    resumed(tmp_path, COLOCATE, moe, trained)


def test_a_number_that_is_none_ends_a_run_beside_servers_that_sample(moe: Path, tmp_path: Path) -> None:
    """In separate_async, a log-probability that is not a number ends the run by name."""
    lost = run_verl(
        tmp_path / "nan",
        [*BLOCK, *SEPARATE, "trainer.total_training_steps=4"],
        model=moe,
        plugin=True,
        env={FAULT: "nonfinite_logprob@2"},
    )
    lost.expect_failure(None)
    assert "NonFiniteLogprobError" in lost.log and "token 1: the engine reported log-probability nan" in lost.log


def test_a_killed_run_goes_on_with_what_was_in_flight(moe: Path, tmp_path: Path) -> None:
    """In separate_async, a run that is killed with kill -9 goes on from its last checkpoint and what was in flight."""
    killed = run_verl(
        tmp_path,
        [*BLOCK, *SEPARATE, "trainer.save_freq=1", "trainer.total_training_steps=4"],
        model=moe,
        plugin=True,
        until=written(tmp_path, 2),
    )
    assert killed.code == KILLED
    (tmp_path / "metrics.jsonl").unlink(missing_ok=True)
    run = resumed(
        tmp_path, SEPARATE, moe, int((tmp_path / "checkpoints/latest_checkpointed_iteration.txt").read_text())
    )
    assert all(step["mismatch/k3_kl"] >= 0 for step in run.steps)
    assert read_run(tmp_path / "checkpoints/mismatch").steps[0].metrics["mismatch/k3_kl"] <= FLOAT32_K3


def written(work: Path, step: int) -> Callable[[], bool]:
    """Return what tells that a step's metrics are written, which come after its checkpoint."""

    def there() -> bool:
        file = work / "metrics.jsonl"
        return file.exists() and len(file.read_text().splitlines()) >= step

    return there
