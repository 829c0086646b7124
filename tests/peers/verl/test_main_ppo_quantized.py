"""verl's own trainer with engines that are quantized on purpose: as the block names it, they train, and updates are verified."""

from __future__ import annotations

from pathlib import Path

import pytest

from mismatch_ext.log_reading import read_run
from tests.models import tiny_model
from tests.peers.engines.sglang_environment import MAIN
from tests.peers.verl.main_ppo import run_verl
from tests.peers.verl.main_ppo_sglang import run_verl_sglang

pytestmark = [pytest.mark.nightly, pytest.mark.engine]
FORMAT = "fp8_per_channel"


def test_verl_trains_with_a_quantized_rollout_and_verifies_its_updates(tmp_path: Path) -> None:
    """verl's main_ppo trains with a vLLM that quantizes each update; updates are verified."""
    model = tiny_model("dense", tmp_path / "model")
    overrides = [
        f"+mismatch.precision={{dtype:bfloat16,engine_weights:{FORMAT}}}",
        f"+actor_rollout_ref.rollout.engine_kwargs.vllm.quantization={FORMAT}",
    ]
    run = run_verl(tmp_path, overrides, model=model, plugin=True)
    steps = run.expect()
    assert all(0 < step["mismatch/k3_kl"] < 0.1 for step in steps), steps
    assert f"engine_weights={FORMAT}" in run.log and "\n  audit " in run.log
    data = read_run(tmp_path / "checkpoints/mismatch")
    assert data.header["audit"]["ok"] and "float8_e4m3fn" in data.header["engine"]["parameter_dtypes"]
    # Each update was judged, and none was found to be of other weights.
    assert all(step["mismatch/weight_sync_gap"] > 0 for step in steps)
    assert not [event for event in data.events if event.name == "weight_sync"]


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
