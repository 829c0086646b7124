"""verl's own trainer on two ranks with two rollout servers: every section, and faults that no rank may wait for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mismatch_ext.log_reading import read_run
from tests.models import tiny_model
from tests.peers.death import plain
from tests.peers.verl.cpu.faults import FAULT
from tests.peers.verl.main_ppo import lasting, run_verl
from tests.peers.verl.test_main_ppo import FLOAT32_K3

pytestmark = pytest.mark.nightly

TWO = (
    *("trainer.n_gpus_per_node=2", "++ray_kwargs.ray_init.num_gpus=2"),
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    *(f"actor_rollout_ref.{role}.log_prob_micro_batch_size_per_gpu=4" for role in ("ref", "rollout")),
    *("actor_rollout_ref.actor.strategy=fsdp", "actor_rollout_ref.ref.strategy=fsdp"),
    *("+mismatch.precision.dtype=float32", "+mismatch.lr.period=2"),
)
"""Two ranks of the actor with FSDP1, verl's default."""


def test_two_ranks_and_two_servers_have_no_gap_in_float32_and_a_bad_row_has_no_part(tmp_path: Path) -> None:
    """In verl, every section runs with two ranks and two rollout servers, and replay is exact in float32."""
    sections = (
        "+mismatch.routing={mode:R3,measured:1.0}",
        "+mismatch.correction.preset=decoupled_geo_rs_token_tis",
        "+mismatch.kl.coef=0.05",
        "+mismatch.monitor.max_bad_rows=1",
        "actor_rollout_ref.rollout.agent.num_workers=2",
    )
    model = tiny_model("moe", tmp_path / "model")
    env = {FAULT: "nonfinite_logprob@2"}
    steps = run_verl(tmp_path, [*TWO, *sections], model=model, plugin=True, timeout=560, env=env).expect()
    assert all(0 <= step["mismatch/k3_kl"] <= FLOAT32_K3 for step in steps)
    assert [step["mismatch/routing/set_mismatch_frac"] for step in steps] == [0.0] * 3
    assert [step["mismatch/lr_multiplier"] for step in steps] == [1.0, 1.0, 0.5]
    # Both loop workers spoil one answer.
    assert 1 <= steps[1]["mismatch/bad_rows/rollout_logprobs"] <= 2
    assert all(step["actor/grad_norm"] > 0 for step in steps)


def parameters(work: Path, step: int) -> list[Any]:
    folder = work / f"checkpoints/global_step_{step}/actor"
    return [plain(torch.load(folder / f"model_world_size_2_rank_{rank}.pt", weights_only=False)) for rank in range(2)]


def test_nan_on_one_rank_a_full_disk_and_a_batch_of_bad_rows(tmp_path: Path) -> None:
    """No rank waits for one whose loss is not a number; a full disk ends nothing; a batch without a good row ends the run."""
    fault = "nan_on_one_rank@2,full_disk@3+4,nothing_finite@5"
    run = run_verl(
        tmp_path, [*TWO, "trainer.save_freq=1", *lasting(7)], model=tiny_model("dense", tmp_path / "model"),
        plugin=True, timeout=560, env={FAULT: fault},
    )  # fmt: skip
    steps = run.expect(5)
    assert [step["mismatch/skipped_steps"] for step in steps] == [0, 1, 0, 0, 0]
    # Neither the step whose gradient is not finite nor the one with no good row moves the weights: no momentum is left to act.
    of_steps = [parameters(tmp_path, step) for step in range(1, 6)]
    moved = [before != after for before, after in zip(of_steps, of_steps[1:], strict=False)]
    assert moved == [False, True, True, False]
    states = [(tmp_path / f"checkpoints/global_step_{step}/mismatch.json").exists() for step in range(1, 6)]
    assert states == [True, True, False, True, True]
    data = read_run(tmp_path / "checkpoints/mismatch")
    assert [step.step for step in data.steps] == [1, 2, 4, 5]
    (ended,) = [event for event in data.events if (event.name, event.level) == ("bad_rows", "error")]
    assert ended.step == 5 and ended.message.startswith("16 of the 80 rows of steps 1 to 5 were bad")
    assert steps[4]["mismatch/bad_rows/rollout_logprobs"] == 16 and "actor/grad_norm" not in steps[4]
    assert list((tmp_path / "checkpoints/mismatch").glob("evidence-5*"))
