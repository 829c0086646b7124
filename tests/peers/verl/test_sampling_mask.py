"""Sampling-mask replay in verl's own trainer: vLLM's masks, through tools and turns, under every pass of an FSDP actor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mismatch_ext.log_reading import read_run
from tests.peers.verl.main_ppo import lasting, run_verl
from tests.peers.verl.test_main_ppo import FLOAT32_K3, FSDP1, TOOLS

pytestmark = [pytest.mark.nightly, pytest.mark.engine]

SECTIONS = (
    "+mismatch.precision.dtype=float32",
    "+mismatch.routing={mode:R3,measured:1.0}",
    "+mismatch.correction.preset=decoupled_geo_rs_token_tis",
    "+mismatch.kl={coef:0.05}",
    "+mismatch.lr.period=2",
    "+mismatch.sampling_mask={}",
)
TRUNCATED = ("actor_rollout_ref.rollout.top_p=0.9", "actor_rollout_ref.rollout.top_k=8")


def test_every_pass_is_over_what_was_left_to_sample_from(moe: Path, tmp_path: Path) -> None:
    run = run_verl(tmp_path, [*SECTIONS, *TRUNCATED, *FSDP1, *TOOLS, *lasting(2)], model=moe, plugin=True)
    steps = run.expect(2)
    # Tokens that were cut off have a tenth of the mass.
    assert all(0 <= step[f"mismatch/{name}"] <= FLOAT32_K3 for step in steps for name in ("k3_kl", "native/k3_kl"))
    assert all(step["mismatch/support_truncated"] == 0 for step in steps)
    assert all(1 < step["mismatch/sampling_mask_size"] <= 8.5 for step in steps)
    assert all(step["mismatch/routing/set_mismatch_frac"] == 0 for step in steps)
    # At the first step the reference is the policy, over the same masks.
    assert 0 <= steps[0]["mismatch/kl_ref_k3"] <= FLOAT32_K3
    header = read_run(tmp_path / "checkpoints/mismatch").header
    assert "vllm/top_logprobs" in {patch["name"] for patch in header["patches"]}
    assert torch.isfinite(torch.tensor([step["actor/grad_norm"] for step in steps])).all()
