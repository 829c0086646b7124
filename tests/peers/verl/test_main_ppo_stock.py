"""verl's own trainer beside stock: without a block, and with `mismatch: {}` while faults happen, no number changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mismatch_ext.log_reading import read_run
from tests.models import tiny_model
from tests.peers.death import plain
from tests.peers.verl.cpu.faults import FAULT
from tests.peers.verl.main_ppo import PROMPTS, dtypes, run_verl
from tests.peers.verl.modes import COLOCATE, IN_TURN, SEPARATE

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

TIMES = ("timing_", "perf/", "actor/perf/")
"""Metrics of time and memory, which differ from run to run."""
# A fault by its name in cpu/faults.py: the check that finds it, at which step, and words of what it says.
CHECKS = {
    "garbled_weights@1": ("weight_sync", 1, "weight update 2: garbled"),
    "moved_temperature@3": ("sampling", 3, "was sampled with temperature=0.7"),
}
# A fault that makes rows bad: the reason, at which step, and how many.
BAD = {"nonfinite_logprob@2": ("rollout_logprobs", 2, 1), "encoded_otherwise@3": ("tokens", 3, PROMPTS)}


def numbers(steps: list[dict[str, float]]) -> list[dict[str, Any]]:
    """Return what verl itself logged, without times; what is no number is a word."""
    kept = [{k: v for k, v in step.items() if not k.startswith((*TIMES, "mismatch/"))} for step in steps]
    return [{k: v if v == v else "nan" for k, v in step.items()} for step in kept]


def parameters(folder: Path) -> Any:
    actor = folder / "checkpoints/global_step_3/actor"
    return plain(torch.load(actor / "model_world_size_1_rank_0.pt", weights_only=False))


@pytest.mark.parametrize("mode", [(), COLOCATE, SEPARATE], ids=["sync", "colocate_async", "separate_async"])
def test_no_block_and_one_that_measures_change_no_number(mode: tuple[str, ...], tmp_path: Path) -> None:
    model = tiny_model("dense", tmp_path / "model")
    # Which answers make a batch hangs on when they end; here each batch is of the prompts that were asked for last.
    overrides = [*dtypes("bfloat16"), *mode, *(IN_TURN if mode else ()), "trainer.total_training_steps=2"]
    block = ["+mismatch={}"] if mode else []
    stock = run_verl(tmp_path / "stock", overrides, model=model, plugin=False)
    installed = run_verl(tmp_path / "installed", [*overrides, *block], model=model, plugin=True)
    assert numbers(installed.expect(2)) == numbers(stock.expect(2))
    assert (installed.reports is None) == (not block)
    assert all(("mismatch/k3_kl" in step) == bool(block) for step in installed.steps)
    assert all(step["actor/grad_norm"] > 0 for step in stock.steps)


def test_a_config_that_only_measures_changes_nothing_and_tells_all_faults(tmp_path: Path) -> None:
    model = tiny_model("dense", tmp_path / "model")
    env = {FAULT: ",".join([*CHECKS, *BAD])}
    settings = [*dtypes("bfloat16"), "trainer.save_freq=3"]
    stock = run_verl(tmp_path / "stock", settings, model=model, plugin=False, env=env)
    measured = run_verl(tmp_path / "measured", [*settings, "+mismatch={}"], model=model, plugin=True, env=env)
    assert numbers(measured.expect()) == numbers(stock.expect())
    assert parameters(tmp_path / "measured") == parameters(tmp_path / "stock")
    run = read_run(tmp_path / "measured/checkpoints/mismatch")
    failed = [(event.step, event.data) for event in run.events if event.name == "check_failed"]
    for check, at, words in CHECKS.values():
        told = [data["message"] for step, data in failed if (data["check"], step) == (check, at)]
        assert any(words in message for message in told), (check, told, failed)
        assert f"the check {check!r} failed at step {at}" in measured.log
    assert {data["check"] for _, data in failed} == {check for check, _, _ in CHECKS.values()}
    for reason, at, count in BAD.values():
        counted = [step.get(f"mismatch/bad_rows/{reason}", 0) for step in measured.steps]
        assert counted == [count if step == at else 0 for step in (1, 2, 3)]
    assert run.header["acts"] is False and [end.status for end in run.ends] == ["completed"]
