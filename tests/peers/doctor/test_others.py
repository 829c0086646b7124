"""Models that no other test gives an engine, by a new user's commands: the gate, a clean run, and a served copy with a fault."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from examples.arithmetic.tokenizer import EOS_ID, PAD_ID, VOCABULARY, make_tokenizer

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
    "granitemoehybrid": Kind(
        {"layer_types": ["mamba", "attention"] * 2, "num_local_experts": 0, "num_experts_per_tok": 0, "mamba_n_heads": 8,
         "shared_intermediate_size": 128, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 32,
         "position_embedding_type": "rope"},
        lambda config: config["rope_parameters"].update(rope_theta=11_300.0), "rope_theta", (1.08, 1.18), "layer 0, mamba",
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


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_of_model_passes_and_its_fault_is_named(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model that nobody tried passes the gate, is clean, and its fault is named with its value."""
    from mismatch_ext.adapters import cli

    from tests.peers.doctor import faults

    assert faults.FOLDER.exists()  # importing it sets how vLLM runs in this process
    made(name, tmp_path)
    given = ["--model", str(tmp_path / "model"), "--prompts", "examples/doctor/prompts.jsonl"]
    given += ["--engine-arg", "max_model_len=160"]
    status = cli.main(["gate", *given, "--quick", "--max-tokens", "64"])
    page = capsys.readouterr().out
    assert f"first block that differs: {KINDS[name].first}" in page and "blocks that differ, of 8 " in page, page
    assert status == (KINDS[name].first != "none of 8"), page
    doctor = ["doctor", *given, "--max-tokens", "96"]
    assert cli.main([*doctor, "--quick", "--out", str(tmp_path / "clean")]) == 0, capsys.readouterr().out
    faulty = cli.main([*doctor, "--engine-model", str(tmp_path / "served"), "--out", str(tmp_path / "fault")])
    assert faulty == 1, capsys.readouterr().out
    (cause,) = json.loads((tmp_path / "fault/doctor.json").read_text("utf-8"))["causes"]
    low, high = KINDS[name].near
    assert (
        cause["key"] == KINDS[name].key
        and cause["status"] in ("confirmed", "fits")
        and low <= cause["parameter"] <= high
    ), cause
