"""verl's trainer as it is, with this package installed and no block, and by examples/verl_grpo.sh with one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from examples.arithmetic.pretrain import ensure_model
from tests.peers.verl.cpu.assets import write_prompts
from tests.peers.verl.main_ppo import DEVICE, GRPO, PROMPTS, ROOT, VerlRun, cpu_paths, dtypes, run_command, run_verl

pytestmark = pytest.mark.engine

TIMES = ("timing_", "perf/", "actor/perf/")
"""Metrics of time and memory, which differ from run to run."""


def numbers(run: VerlRun) -> list[dict[str, float]]:
    return [{name: value for name, value in step.items() if not name.startswith(TIMES)} for step in run.expect()]


@pytest.fixture(scope="module")
def model() -> Path:
    return ensure_model("dense", ROOT / ".cache/models", progress=False)


@pytest.fixture(scope="module")
def stock(model: Path, tmp_path_factory: pytest.TempPathFactory) -> VerlRun:
    """Return a run of verl without this package, in bfloat16 on both sides."""
    return run_verl(tmp_path_factory.mktemp("stock"), dtypes("bfloat16"), model=model, plugin=False)


def test_stock_trains(stock: VerlRun) -> None:
    steps = numbers(stock)
    assert not any(name.startswith("mismatch/") for name in steps[0])
    assert all(step["actor/grad_norm"] > 0 for step in steps)
    # The weights of step 1 reached the rollout: the gap stays that of the dtype.
    assert all(0 < step["rollout_corr/k3_kl"] < 1e-2 for step in steps)
    assert steps[0]["actor/kl_loss"] == 0.0 < steps[2]["actor/kl_loss"]


def test_installed_without_a_block_changes_no_number(stock: VerlRun, model: Path, tmp_path: Path) -> None:
    installed = run_verl(tmp_path, dtypes("bfloat16"), model=model, plugin=True)
    assert numbers(installed) == numbers(stock)


def test_the_example_trains_in_float16(stock: VerlRun, model: Path, tmp_path: Path) -> None:
    script = ["bash", str(ROOT / "examples/verl_grpo.sh")]
    data = write_prompts(tmp_path / "prompts.parquet", 3 * PROMPTS)
    # What verl's gradient scaler does on a CPU by itself, which is nothing, is left as it is.
    env = {"PYTHON": sys.executable, "VERL_CPU_STOCK_SCALER": "1"}
    run = run_command(tmp_path, [*script, *cpu_paths(tmp_path, data, model), *DEVICE, *GRPO], timeout=420, env=env)
    steps = run.expect()
    assert "mismatch-ext" in run.log and "precision  uniform float16" in run.log
    # Before the first update both runs have sampled the same answers from the same weights.
    assert 0 < 20 * steps[0]["mismatch/k3_kl"] < stock.steps[0]["rollout_corr/k3_kl"]
    assert [step["mismatch/loss_scale"] for step in steps] == sorted(
        (step["mismatch/loss_scale"] for step in steps), reverse=True
    )
    trained = [step for step in steps if step["actor/grad_norm"] > 0]
    assert trained, [step["actor/grad_norm"] for step in steps]
