"""Other kinds of models, by a new user's commands: the gate, a clean run, and a served copy with a fault."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from examples.arithmetic.tokenizer import EOS_ID, PAD_ID, VOCABULARY, make_tokenizer
from tests.commands import shell

pytestmark = [pytest.mark.nightly, pytest.mark.engine, pytest.mark.timeout(1500)]
SIZES: dict[str, Any] = {
    "vocab_size": len(VOCABULARY), "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.2, "tie_word_embeddings": False,
    "bos_token_id": None, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}  # fmt: skip


class Kind(NamedTuple):
    """Settings of a model, the fault of its served copy, the cause that it is, that cause's value, and the gate's first block."""

    own: dict[str, Any]
    fault: Callable[[dict[str, Any]], None]
    key: str
    near: tuple[float, float]
    first: str = "none of 8"


KINDS = {
    # A shared expert with a gate of its own, and weights of chosen experts that are not normalized.
    "qwen2_moe": Kind(
        {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
        lambda config: config.update(norm_topk_prob=True), "expert_norm", (1, 1),
    ),
    # Layers of Mamba-2 and of attention in turn. A weight update of vLLM 0.30 on a CPU does not reach the convolution of Mamba-2.
    # The rounding of this model is 40 times that of the shipped ones: a rope_theta of 11,300 is placed, and not named.
    "granitemoehybrid": Kind(
        {"layer_types": ["mamba", "attention"] * 2, "num_local_experts": 0, "num_experts_per_tok": 0, "mamba_n_heads": 8,
         "shared_intermediate_size": 128, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 32,
         "position_embedding_type": "rope"},
        lambda config: config["rope_parameters"].update(rope_theta=20_000.0), "rope_theta", (1.7, 2.3),
        "layer 0, mamba",
    ),
    # Logits that are scaled after the head.
    "granite": Kind(
        {"embedding_multiplier": 6.0, "residual_multiplier": 0.5, "attention_multiplier": 0.125, "logits_scaling": 2.0},
        lambda config: config.update(logits_scaling=2.1), "logit_scale", (0.945, 0.96),
    ),
}  # fmt: skip


def made(name: str, folder: Path) -> None:
    """Write a model of random weights and a copy whose configuration has the fault."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SIZES | KINDS[name].own))
    model.generation_config = GenerationConfig(eos_token_id=EOS_ID, pad_token_id=PAD_ID)
    model.save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    shutil.copytree(folder / "model", folder / "served")
    config = json.loads((folder / "served/config.json").read_text("utf-8"))
    KINDS[name].fault(config)
    (folder / "served/config.json").write_text(json.dumps(config), "utf-8")


def ended(status: int, command: str) -> str:
    """Run a command that must end with a status, and return what it printed."""
    return shell(command, statuses=(status,), OMP_NUM_THREADS="1", VLLM_CPU_KVCACHE_SPACE="1")


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_of_model_is_clean_and_its_fault_is_named(name: str, tmp_path: Path) -> None:
    """The gate says what vLLM does with an update, a clean run is clean, and a fault is named with its value."""
    made(name, tmp_path)
    given = f"--model {tmp_path}/model --prompts examples/doctor/prompts.jsonl --engine-arg max_model_len=160"
    first = KINDS[name].first
    page = ended(int(first != "none of 8"), f"mismatch-ext gate {given} --quick --max-tokens 64")
    assert f"first block that differs: {first}" in page and "blocks that differ, of 8 " in page, page
    ended(0, f"mismatch-ext doctor {given} --max-tokens 96 --quick --out {tmp_path}/clean")
    served = f"--engine-model {tmp_path}/served --responses 96 --max-tokens 96 --out {tmp_path}/fault"
    ended(1, f"mismatch-ext doctor {given} {served}")
    (cause,) = json.loads((tmp_path / "fault/doctor.json").read_text("utf-8"))["causes"]
    low, high = KINDS[name].near
    assert (
        cause["key"] == KINDS[name].key
        and cause["status"] in ("confirmed", "fits")
        and low <= cause["parameter"] <= high
    ), cause
