"""verl's own trainer on two ranks, with two rollout servers, and with two data-parallel engines in one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.models import tiny_model
from tests.peers.verl.main_ppo import run_verl

pytestmark = pytest.mark.nightly

# Half the square of 256 roundings, as in the shorter runs: trainer and engine sum the same float32 products in other orders.
FLOAT32_K3 = 0.5 * (256 * torch.finfo(torch.float32).eps) ** 2

TWO = (
    *("trainer.n_gpus_per_node=2", "++ray_kwargs.ray_init.num_gpus=2"),
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    *(f"actor_rollout_ref.{role}.log_prob_micro_batch_size_per_gpu=4" for role in ("ref", "rollout")),
    *("actor_rollout_ref.actor.strategy=fsdp", "actor_rollout_ref.ref.strategy=fsdp"),
    *("+mismatch.precision.dtype=float32", "+mismatch.lr.period=2"),
)
"""Two ranks of the actor with FSDP1, verl's default."""


def test_two_ranks_and_two_servers_have_no_gap_in_float32(tmp_path: Path) -> None:
    """In verl, every section runs with two ranks and two rollout servers, and replay is exact in float32."""
    sections = (
        "+mismatch.routing={mode:R3,measured:1.0}",
        "+mismatch.correction.preset=decoupled_geo_rs_token_tis",
        "+mismatch.kl.coef=0.05",
        "actor_rollout_ref.rollout.agent.num_workers=2",
    )
    steps = run_verl(
        tmp_path, [*TWO, *sections], model=tiny_model("moe", tmp_path / "model"), plugin=True, timeout=560
    ).expect()
    assert all(0 <= step["mismatch/k3_kl"] <= FLOAT32_K3 for step in steps)
    assert [step["mismatch/routing/set_mismatch_frac"] for step in steps] == [0.0] * 3
    assert [step["mismatch/lr_multiplier"] for step in steps] == [1.0, 1.0, 0.5]


def test_weights_of_data_parallel_engines_are_said_to_be_unverified_and_the_rest_works(tmp_path: Path) -> None:
    engines = ("actor_rollout_ref.rollout.data_parallel_size=2", "actor_rollout_ref.rollout.n_gpus_per_node=2")
    run = run_verl(tmp_path, [*TWO, *engines], model=tiny_model("dense", tmp_path / "model"), plugin=True, timeout=560)
    steps = run.expect()
    (server,) = run.reports["rollouts"]
    assert server["expected"] == len(server["reports"]) == 1
    assert "data_parallel_size=2: the rollout's weights are not verified" in run.log
    assert not any("mismatch/weight_sync_gap" in step for step in steps)
    assert all(0 <= step["mismatch/k3_kl"] <= FLOAT32_K3 for step in steps)
    assert all(step["actor/grad_norm"] > 0 for step in steps)
