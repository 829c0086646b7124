"""Replay under other implementations and dtypes of the experts, adapters, and several ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from mismatch_ext.adapters.transformers.routing import moe_layout, record_routing, replay_routing
from peft import LoraConfig, get_peft_model

from tests.oracles.routing.passes import (
    another,
    forward,
    run,
)
from tests.peers.scenarios import Run, named
from tests.peers.transformers.cases import FAMILIES, QWEN, REENTRANT, case, replayed

scenarios = named("tests.peers.transformers.scenarios_sharded")

# Experts' implementations and dtypes.


@pytest.mark.numeric
@pytest.mark.numeric
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("experts", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_implementations_of_the_experts(name: str, experts: str, dtype: torch.dtype) -> None:
    model, own, plain = case(name, dtype, experts)
    assert model.config._experts_implementation == experts
    assert replayed(model, own).same(plain)
    expected = replayed(model, another(own))
    assert not torch.equal(expected.logits, plain.logits)
    checkpointed = FAMILIES[name].build(dtype, experts=experts)
    for reentrant in REENTRANT:
        checkpointed.gradient_checkpointing_enable({"use_reentrant": reentrant})
        assert replayed(checkpointed, another(own)).same(expected)


@pytest.mark.numeric
@pytest.mark.numeric
def test_autocast() -> None:
    model = case(QWEN)[0]
    with torch.autocast("cpu", torch.bfloat16):
        with record_routing(model) as recording:
            plain = run(model)
        assert replayed(model, recording.trace).same(plain)


# PEFT.

TUNED = {
    "attention": (QWEN, {"target_modules": ["q_proj", "v_proj"]}),
    "experts": (
        QWEN,
        {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
    ),
    "router module": ("hunyuan_v1_moe", {"target_modules": ["wg"]}),
    "saved block": (QWEN, {"target_modules": ["q_proj"], "modules_to_save": ["mlp"]}),
}


@pytest.mark.parametrize("what", list(TUNED))
def test_peft(what: str) -> None:
    name, settings = TUNED[what]
    torch.manual_seed(0)
    model: Any = get_peft_model(FAMILIES[name].build(), LoraConfig(r=4, lora_dropout=0.0, **settings)).train()
    for parameter_name, parameter in model.named_parameters():
        if "lora_B" in parameter_name:
            torch.nn.init.normal_(parameter, 0, 0.1)
    assert moe_layout(model).layers == case(name)[1].layers
    plain = run(model)
    with record_routing(model) as recording:
        assert run(model).same(plain)
    own = recording.trace
    assert replayed(model, own).same(plain)
    expected = replayed(model, another(own))
    with torch.no_grad(), replay_routing(model, another(own)), model.disable_adapter():
        base = forward(model)[0]
    assert torch.equal(base, replayed(case(name)[0], another(own)).logits)
    assert not torch.equal(base, expected.logits)
    for reentrant in REENTRANT:
        model.base_model.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        assert replayed(model, another(own)).same(expected)


# Distributed.


@pytest.mark.engine
@pytest.mark.parametrize(
    "world, name, how", [(1, QWEN, "fsdp2"), (2, "deepseek_v3", "fsdp2"), (2, QWEN, "ddp")], ids=str
)
def test_sharded_and_replicated(run: Run, world: int, name: str, how: str) -> None:
    ranks = run(scenarios.sharded, world=world, family=name, how=how).expect()
    assert len(ranks) == world
    for results in ranks:
        assert set(results) == {"None", "True", "False"}
        for result in results.values():
            assert result["logits"] and result["names"] and result["gradients"] <= 1e-6
