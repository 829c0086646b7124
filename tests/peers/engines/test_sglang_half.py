"""Real SGLang in half precision on a CPU: what replaying its experts removes, what float16 leaves, and float32 masters."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.peers.engines.sglang_environment import VERSIONS, run_sglang
from tests.peers.scenarios import named

scenarios = named("tests.peers.engines.scenarios_sglang")

pytestmark = [pytest.mark.nightly, pytest.mark.engine, pytest.mark.timeout(900)]


def flip_model(directory: Path) -> Path:
    """Save a model whose experts flip between two bfloat16 implementations."""
    common: dict[str, Any] = {
        "vocab_size": 256, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 32, "max_position_embeddings": 512, "intermediate_size": 128, "tie_word_embeddings": False, "eos_token_id": 1,
        "bos_token_id": None, "pad_token_id": 0, "initializer_range": 0.15,
    }  # fmt: skip
    experts = {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen3ForCausalLM(Qwen3Config(**common))  # draws the numbers before the ones that made this model
        model: PreTrainedModel = Qwen3MoeForCausalLM(Qwen3MoeConfig(**common, **experts, mlp_only_layers=[]))
    model.to(torch.bfloat16).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Sample in both half precisions from one model."""
    folder = tmp_path_factory.mktemp("half")
    model = flip_model(folder / "model")
    return {
        dtype: run_sglang(scenarios.half, VERSIONS[0], folder, dtype=dtype, model=model)
        for dtype in ("bfloat16", "float16")
    }


def test_the_engines_run_in_the_dtype_asked_for(half: dict[str, dict[str, Any]]) -> None:
    assert {dtype: found["dtype"] for dtype, found in half.items()} == {"bfloat16": "bfloat16", "float16": "float16"}
    assert all(found["stub"]["called"] == 0 for found in half.values())


def test_replaying_the_engines_experts_removes_the_gap_of_a_flip(half: dict[str, dict[str, Any]]) -> None:
    found = half["bfloat16"]
    flipped = [row for row, count in enumerate(found["differing"]) if count]
    native, replayed = (sum(found[way][row] for row in flipped) for way in ("native", "replayed"))
    # Over all requests on which the two chose other experts; what is left is rounding.
    assert len(flipped) > 5 and replayed < native / 4


def test_float16_is_closer_by_the_ratio_of_the_roundings(half: dict[str, dict[str, Any]]) -> None:
    # 11 bits of mantissa against 8; experts replayed, so that nothing but rounding is left.
    ratio = half["bfloat16"]["mean"] / half["float16"]["mean"]
    assert 4 < ratio < 16, ratio  # three bits are a factor of 8
    # Experts flip less often, too.
    assert statistics.mean(half["float16"]["differing"]) < statistics.mean(half["bfloat16"]["differing"])
