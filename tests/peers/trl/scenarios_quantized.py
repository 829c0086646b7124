"""Runs of TRL with a vLLM that quantizes on purpose."""

from __future__ import annotations

from typing import Any

import torch
from mismatch_ext.adapters import vllm as engine
from torch import Tensor
from vllm.model_executor.layers.quantization.online import fp8

from mismatch_ext.errors import PrecisionError
from tests.peers.trl.scenarios_training import build, outcome


def quantized(model: str, out: str) -> dict[str, Any]:
    """Train with fp8 weights, hold the engine's to vLLM's own quantization of the trainer's; then ask for what does nothing."""
    precision = {"dtype": "bfloat16", "engine_weights": "fp8_per_channel"}
    trainer = build(model, f"{out}/run", {"precision": precision, "correction": {"preset": "token_truncate"}})
    llm = trainer.vllm_generation.llm
    before = held(llm)
    trainer.train()
    after = held(llm)
    # TRL sends before it generates: the last step's weights are still to be sent.
    trainer.vllm_generation.sync_weights()
    sent = {n: p.detach().bfloat16() for n, p in trainer.accelerator.unwrap_model(trainer.model).named_parameters()}
    layers = {name: weight for name, weight in held(llm).items() if name.endswith(("o_proj", "down_proj"))}
    other = sum(not torch.equal(weight, by_vllm(sent[f"{name}.weight"])) for name, weight in layers.items())
    moved = sum(not torch.equal(before[name], after[name]) for name in after)
    verdict = trainer.mm.verdict
    found = outcome(trainer, verdict=verdict and verdict.status, layers=len(layers), other=other, moved=moved)
    engine.shutdown(llm)
    refused = ""
    try:
        nothing = {"dtype": "bfloat16", "engine_weights": "int8_per_channel_weight_only"}
        build(model, f"{out}/refused", {"precision": nothing})
    except PrecisionError as error:
        refused = str(error)
    return found | {"refused": refused}


def held(llm: Any) -> dict[str, Tensor]:
    """Return what the engine's quantized layers stand for, by name, `[out, in]`."""
    modules = engine.runner(llm).model.named_modules()
    return {
        name: (module.weight.t().float() * module.weight_scale.view(-1, 1)).clone()
        for name, module in modules
        if getattr(getattr(module, "weight", None), "dtype", None) == torch.float8_e4m3fn
    }


def by_vllm(weight: Tensor) -> Tensor:
    """Return what vLLM's own quantization leaves of a weight."""
    scale = fp8._fp8_channel_scale(fp8.weight_amax(weight, dim=-1, keepdim=True))
    return fp8._fp8_quant_per_channel(weight, scale).float() * scale.view(-1, 1)
