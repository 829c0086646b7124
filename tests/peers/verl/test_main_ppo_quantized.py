"""verl's own trainer with an engine that is quantized on purpose: as the block names it, it trains, and updates are verified."""

from __future__ import annotations

from pathlib import Path

import pytest

from mismatch_ext.log_reading import read_run
from tests.models import tiny_model
from tests.peers.engines.sglang_environment import MAIN
from tests.peers.verl.main_ppo_sglang import run_verl_sglang

pytestmark = [pytest.mark.nightly, pytest.mark.engine]


def test_verl_trains_with_sglang_whose_cache_is_quantized(tmp_path: Path) -> None:
    """verl's main_ppo trains with an SGLang whose KV cache is in fp8, as the block names it; updates are verified."""
    model = tiny_model("dense", tmp_path / "model")
    overrides = [
        "+mismatch.precision={dtype:bfloat16,engine_kv_cache:fp8_e4m3}",
        "++actor_rollout_ref.rollout.engine_kwargs.sglang.kv_cache_dtype=fp8_e4m3",
    ]
    run = run_verl_sglang(tmp_path, overrides, model=model, plugin=True, version=MAIN)
    steps = run.expect()
    assert all(0 < step["mismatch/k3_kl"] < 0.1 and step["mismatch/weight_sync_gap"] > 0 for step in steps), steps
    assert "engine_kv_cache=fp8_e4m3" in run.log and "\n  audit " in run.log
    assert not [event for event in read_run(tmp_path / "checkpoints/mismatch").events if event.name == "weight_sync"]
