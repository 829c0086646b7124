"""verl's own trainer on a real vocabulary with a tied head: five weight updates in a row reach vLLM in either dtype.

The model is the first four layers of SmolLM2-135M-Instruct. The check compares gaps with this model's own rounding.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.smollm2 import unpack
from mismatch_ext.log_reading import read_run
from tests.peers.verl.cpu.faults import FAULT
from tests.peers.verl.main_ppo import VerlRun, dtypes, lasting, run_verl

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

UPDATES = 5
REAL = (
    "actor_rollout_ref.model.custom_chat_template=null",
    "data.max_prompt_length=64",
    "data.max_response_length=16",
    "actor_rollout_ref.rollout.max_model_len=128",
    # Its 134 million bytes hold the embedding alone: vLLM refuses a bucket that has a tied head and not the embedding.
    "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=128",
    "reward.custom_reward_function.name=even_share",
    "+mismatch.monitor.weight_sync=error",
)
FEWER = (
    "data.train_batch_size=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.actor.use_kl_loss=False",
)
"""Half of the answers and no reference: without AMX, a CPU multiplies in bfloat16 many times slower than in float32."""


def trained(dtype: str, work: Path, *more: str, fault: str = "") -> tuple[VerlRun, list[int]]:
    """Train in a dtype on both sides, with a weight update in each step; return also the steps whose update was doubtful."""
    overrides = [*dtypes(dtype), *REAL, *more]
    run = run_verl(work, overrides, model=unpack(layers=4), plugin=True, timeout=840, env={FAULT: fault})
    events = read_run(work / "checkpoints/mismatch").events
    return run, [event.step for event in events if event.name == "weight_sync"]


def test_five_float32_updates_reach_vllm_and_a_lost_tensor_ends_the_run(tmp_path: Path) -> None:
    """The tensor is lost from the sixth step on, and is compared by probes alone. So the second bad update ends the run."""
    run, doubtful = trained("float32", tmp_path, *lasting(UPDATES + 2), fault=f"lost_tensor@{UPDATES + 1}")
    run.expect_failure(None)
    assert doubtful == [UPDATES + 1, UPDATES + 2]
    assert "training failed after 7 steps: WeightSyncError: weight update 8: " in run.log


def test_five_bfloat16_updates_reach_vllm(tmp_path: Path) -> None:
    """One step changes a single tensor by less than bfloat16 rounds, so that no tensor is lost here."""
    run, doubtful = trained("bfloat16", tmp_path, *FEWER, *lasting(UPDATES))
    assert all(step["actor/grad_norm"] > 0 for step in run.expect(UPDATES))
    assert doubtful == []
