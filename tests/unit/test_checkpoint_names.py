"""Weights under the names of the checkpoint, whoever yields them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from mismatch_ext.adapters.transformers.checkpoint import under_checkpoint_names
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tests.models import tiny_mixtral


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_mixtral(tmp_path_factory.mktemp("mixtral"))


def gathered(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor whole until the next one is asked for, as a sharded trainer does."""
    for name, values in model.named_parameters():
        whole = values.detach().clone()
        yield name, whole
        whole.zero_()


def test_experts_are_split_before_their_trainer_frees_them(mixtral: Path) -> None:
    saved = load_file(mixtral / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(mixtral, dtype=torch.float32)
    assert "model.layers.0.mlp.experts.gate_up_proj" in dict(model.named_parameters())
    sent = dict(under_checkpoint_names(model, gathered(model)))
    assert sent.keys() == saved.keys() and "model.layers.0.block_sparse_moe.experts.0.w1.weight" in sent
    assert all(torch.equal(values, saved[name]) for name, values in sent.items())


def test_the_base_model_of_an_adapter_has_the_same_names(mixtral: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(mixtral, dtype=torch.float32)
    plain = [(name, values.detach()) for name, values in model.named_parameters()]
    adapted: Any = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    sent = dict(under_checkpoint_names(adapted.get_base_model(), plain))
    assert sent.keys() == load_file(mixtral / "model.safetensors").keys()


def test_parameters_whose_values_are_on_other_ranks_are_known_by_their_shapes(mixtral: Path) -> None:
    saved = load_file(mixtral / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(mixtral, dtype=torch.float32)
    whole = [(name, values.detach().clone()) for name, values in model.named_parameters()]
    for parameter in model.parameters():  # as DeepSpeed's stage 3 leaves them
        parameter.ds_shape = parameter.shape
        parameter.data = torch.empty(0)
    assert dict(under_checkpoint_names(model, whole)).keys() == saved.keys()
