"""verl's asynchronous modes in whole runs of the recipe's scripts: every section at once, with rollouts of older weights.

Runs that are stopped by an alarm, and go on from every kind of end are in
`tests/peers/verl/test_main_ppo_ended.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from mismatch_ext.log_reading import read_run
from tests.peers.verl.cpu.assets import write_prompts
from tests.peers.verl.main_ppo import DEVICE, GRPO, PROMPTS, ROOT, VerlRun, cpu_paths, run_command
from tests.peers.verl.modes import COLOCATE, SEPARATE
from tests.peers.verl.test_main_ppo import DERIVED_CLASSES, EVERYTHING, FLOAT32_K3, TOOLS, TURNS

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

Ran = tuple[VerlRun, Path]
STEPS = 3
TRUNCATED = ("++mismatch.sampling_mask={}", "actor_rollout_ref.rollout.top_p=0.9", "actor_rollout_ref.rollout.top_k=8")
# Over the script's own block, and without the alarm.
SECTIONS = [
    *(section.replace("+mismatch", "++mismatch") for section in EVERYTHING[:-1]),
    "++mismatch.monitor.metrics=all",
]


def run_example(mode: str, work: Path, overrides: Sequence[str], model: Path, **env: str) -> VerlRun:
    """Run examples/verl_moe.sh in a mode with a tiny model on a CPU."""
    data = write_prompts(work / "prompts.parquet", 3 * PROMPTS)
    command = ["bash", str(ROOT / "examples/verl_moe.sh"), mode, *cpu_paths(work, data, model), *DEVICE, *GRPO]
    return run_command(work, [*command, *SECTIONS, *overrides], timeout=840, env={"PYTHON": sys.executable, **env})


@pytest.fixture(scope="module")
def colocate(moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Return a run on one device with tools and truncated sampling."""
    work = tmp_path_factory.mktemp("colocate")
    overrides = [*COLOCATE, *TOOLS, *TRUNCATED, *DERIVED_CLASSES, f"trainer.total_training_steps={STEPS}"]
    return run_example("colocate_async", work, overrides, moe), work


@pytest.fixture(scope="module")
def separate(moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Return a run on two devices with tools and truncated sampling."""
    work = tmp_path_factory.mktemp("separate")
    overrides = [*SEPARATE, *TOOLS, *TRUNCATED, f"trainer.total_training_steps={STEPS}"]
    return run_example("separate_async", work, overrides, moe), work


def check_sections(run: VerlRun, work: Path, host: str) -> None:
    """Check what every section leaves of a run, whatever its mode."""
    steps = run.steps
    # The first step's rollouts are of the weights that score them, in each of its updates: there is no gap.
    assert 0 <= steps[0]["mismatch/k3_kl"] <= FLOAT32_K3
    assert 0 <= steps[0]["mismatch/native/k3_kl"] <= FLOAT32_K3
    # What later ones learn from is partly older, and that is no gap of numerics.
    assert max(step["training/off_policy/trajectory_staleness_worst/max"] for step in steps) > 0
    assert max(step["mismatch/k3_kl"] for step in steps) > FLOAT32_K3
    # Of the tokens that the scoring weights have sampled the gap is rounding, and no route differs; older ones have drifted a
    # hundred times as far, and more.
    for step in steps:
        if step["mismatch/numerics/tokens"]:
            assert 0 <= step["mismatch/numerics/k3_kl"] <= FLOAT32_K3
            assert step["mismatch/numerics/logp_abs_diff_mean"] <= 1e-5
        else:
            assert "mismatch/numerics/k3_kl" not in step
    stale = [step["mismatch/stale/logp_abs_diff_mean"] for step in steps if "mismatch/stale/logp_abs_diff_mean" in step]
    assert steps[0]["mismatch/numerics/tokens"] and stale and min(stale) > 1e-3
    compared = [step for step in steps if step.get("mismatch/routing/compared_tokens")]
    assert compared and all(step["mismatch/routing/set_mismatch_frac"] == 0 for step in compared)
    # Each server has each update's weights.
    assert all(step["mismatch/weight_sync_gap"] < 1e-4 for step in steps)
    assert [step["mismatch/lr_multiplier"] for step in steps] == [1.0, 1.0, 0.5]
    # Counts are of a step, and no averages of its updates.
    assert all(step["mismatch/routing/compared_tokens"] % 1 == 0 for step in steps)
    assert all(step["mismatch/skipped_steps"] == 0 and step["actor/grad_norm"] > 0 for step in steps)
    assert all(1 < step["mismatch/sampling_mask_size"] <= 8.5 for step in steps)
    # Three turns of the policy, of which an update may come between any two, and two of a tool.
    assert all(step["num_turns/min"] == step["num_turns/max"] == 2 * TURNS for step in steps)
    data = read_run(work / "checkpoints/mismatch")
    assert data.header["run"]["host"].endswith(host)
    assert not [event for event in data.events if event.name == "weight_sync"]


def test_every_section_where_answers_are_aborted_and_resumed(colocate: Ran) -> None:
    run, work = colocate
    run.expect(STEPS)
    check_sections(run, work, "PPOTrainerColocateAsync")


def test_every_section_where_servers_sample_during_updates(separate: Ran) -> None:
    run, work = separate
    run.expect(STEPS)
    check_sections(run, work, "PPOTrainerSeparateAsync")
