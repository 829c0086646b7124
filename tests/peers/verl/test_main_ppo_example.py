"""examples/verl_grpo.sh on a dense model in float16, with every section: what it leaves of the gap that bfloat16 has.

What float16 leaves of bfloat16's error in verl's engine is also in `test_engine.py`, without Ray and vLLM.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.peers.verl.cpu.assets import write_prompts
from tests.peers.verl.main_ppo import (
    DEVICE,
    GRPO,
    PROMPTS,
    ROOT,
    VerlRun,
    cpu_paths,
    dtypes,
    lasting,
    run_command,
    run_verl,
)
from tests.peers.verl.recorded import SCALER, recorded, shape

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

# Over the example's own block, which asks for float16.
EVERYTHING_DENSE = (
    "+mismatch.precision.init_scale=64",
    "+mismatch.kl={reward_path:rewards,coef:0.05}",
    "actor_rollout_ref.actor.use_kl_loss=False",
    "+mismatch.correction.preset=decoupled_seq_is",
    "+mismatch.lr.trigger=response_length",
    "++mismatch.monitor.metrics=all",
)


@pytest.fixture(scope="module")
def example(risky: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[VerlRun, Path]:
    """Return three steps of examples/verl_grpo.sh with every section and a tiny model, in float16, and their folder."""
    work = tmp_path_factory.mktemp("example")
    data = write_prompts(work / "prompts.parquet", 3 * PROMPTS)
    script = ["bash", str(ROOT / "examples/verl_grpo.sh"), *cpu_paths(work, data, risky), *DEVICE, *GRPO]
    # What verl's gradient scaler does on a CPU by itself, which is nothing, is left as it is.
    env = {"PYTHON": sys.executable, "VERL_CPU_STOCK_SCALER": "1"}
    return run_command(work, [*script, *EVERYTHING_DENSE, *lasting(3)], timeout=840, env=env), work


def test_every_section_of_a_dense_model_by_the_example(example: tuple[VerlRun, Path]) -> None:
    run, steps = example[0], example[0].expect(3)
    assert "dtype=float16" in run.log
    penalties = [step["actor/reward_kl_penalty"] for step in steps]
    assert abs(penalties[0]) < 1e-4 < penalties[2], penalties
    assert all(step["actor/reward_kl_penalty_coeff"] == 0.05 for step in steps)
    # One weight a response, close to 1 in float16.
    assert all(abs(step["rollout_corr/rollout_is_mean"] - 1.0) < 0.05 for step in steps)
    assert all(step["mismatch/lr_multiplier"] == 1.0 and step["mismatch/skipped_steps"] == 0.0 for step in steps)
    assert all(step["mismatch/loss_scale"] == 64.0 and step["actor/grad_norm"] > 0 for step in steps)


def test_float16_leaves_a_fraction_of_the_gap_that_bfloat16_has(
    example: tuple[VerlRun, Path], dense: Path, tmp_path: Path
) -> None:
    stock = run_verl(tmp_path, [*dtypes("bfloat16"), *lasting(1)], model=dense, plugin=False)
    # Three bits more of mantissa: 1/64 of k3. Up to the first update both runs sample from the same weights by the same seeds;
    # the near end is far from both.
    half, brain = example[0].expect(3)[0]["mismatch/k3_kl"], stock.expect(1)[0]["rollout_corr/k3_kl"]
    assert 0 < 8 * half < brain, (half, brain)


def test_processes_report_what_is_recorded_of_their_kind(example: tuple[VerlRun, Path]) -> None:
    (worker,) = example[0].reports["workers"]
    assert set(worker) == set(recorded("dense")["workers"][0])
    assert shape(worker["trainer"]["scaler"]) == shape(SCALER)
    (rollout,) = example[0].reports["rollouts"][0]["reports"]
    assert set(rollout["reading"]["parameter_dtypes"]) == {"float16"}
