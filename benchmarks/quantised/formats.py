"""Formats that an engine stores weights, activations and its KV cache in, and how each is started in vLLM and SGLang."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from mismatch_ext.adapters.transformers.doctor.changes import FP8_LARGEST, INT8_LARGEST
from safetensors.torch import load_file, save_file
from torch import Tensor

Round = Callable[[Tensor], Tensor]
GROUP = 32


def fp8_tokens(x: Tensor) -> Tensor:
    """Return what e4m3 leaves with a scale for each token, by its reciprocal: dividing would round some values otherwise."""
    scale = (x.abs().amax(-1, keepdim=True) / FP8_LARGEST).clamp(min=1 / (FP8_LARGEST * 512))
    return (x * scale.reciprocal()).clamp(-FP8_LARGEST, FP8_LARGEST).to(torch.float8_e4m3fn).to(x.dtype) * scale


def int8_tokens(x: Tensor) -> Tensor:
    """Return what int8 leaves with a scale for each token, by the scale's reciprocal as well."""
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / INT8_LARGEST
    return (x * scale.reciprocal()).round().clamp(-INT8_LARGEST, INT8_LARGEST) * scale


@dataclass(frozen=True, kw_only=True)
class Format:
    """One row of the table.

    Args:
        arguments: Of `vllm.LLM`, or of `sglang.Engine`.
        parts: What is quantised, in the order in which it is: weights, activations (what goes into linear layers), KV cache.
        compressed: Field `quantization_config` of a checkpoint that holds integers, and what its layers hold; None serves the
            shipped one.
    """

    arguments: Mapping[str, Any] = field(default_factory=dict)
    parts: tuple[str, ...] = ()
    compressed: tuple[dict[str, Any], Callable[[str, Tensor], dict[str, Tensor]]] | None = None


def _integers(bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "symmetric": True, "strategy": strategy, "dynamic": False, **more}


def _config(form: str, weights: dict[str, Any], activations: dict[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def _eight(name: str, weight: Tensor) -> dict[str, Tensor]:
    scale = weight.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
    return {name: (weight / scale).round().clamp(-127, 127).to(torch.int8), f"{name}_scale": scale}


def _four(name: str, weight: Tensor) -> dict[str, Tensor]:
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    groups = weight.view(weight.shape[0], -1, GROUP)
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 7
    integers = (groups / scale).round().clamp(-8, 7).to(torch.int8).view(weight.shape)
    layer = name.removesuffix(".weight")
    return {
        f"{layer}.weight_packed": pack_to_int32(integers, 4),
        f"{layer}.weight_scale": scale.squeeze(-1).bfloat16(),
        f"{layer}.weight_shape": torch.tensor(weight.shape),
    }


_TOKENS = _integers(8, "token") | {"dynamic": True}
BOTH, CACHE = ("weights", "activations"), ("KV cache",)
VLLM: dict[str, Format] = {
    "bf16": Format(),
    "fp8 weights and activations, a scale per channel and token": Format(
        arguments={"quantization": "fp8_per_channel"}, parts=BOTH
    ),
    "int8 weights and activations (W8A8), a scale per channel and token": Format(
        parts=BOTH, compressed=(_config("int-quantized", _integers(8, "channel"), _TOKENS), _eight)
    ),
    "fp8 KV cache, e4m3": Format(arguments={"kv_cache_dtype": "fp8_e4m3"}, parts=CACHE),
    "fp8 KV cache, e5m2": Format(arguments={"kv_cache_dtype": "fp8_e5m2"}, parts=CACHE),
    "int8 KV cache": Format(arguments={"kv_cache_dtype": "int8_per_token_head"}, parts=CACHE),
    "fp8 weights and activations, a scale per tensor": Format(arguments={"quantization": "fp8"}, parts=BOTH),
    "fp8 weights and activations, a scale per block": Format(arguments={"quantization": "fp8_per_block"}, parts=BOTH),
    "mxfp8": Format(arguments={"quantization": "mxfp8"}, parts=BOTH),
    "int8 weights, by vLLM while it loads": Format(
        arguments={"quantization": "int8_per_channel_weight_only"}, parts=("weights",)
    ),
    "nvfp4 weights, by vLLM while it loads": Format(arguments={"quantization": "nvfp4_per_token"}, parts=BOTH),
    f"int4 weights (W4A16), groups of {GROUP}": Format(
        parts=("weights",),
        compressed=(_config("pack-quantized", _integers(4, "group", group_size=GROUP), None), _four),
    ),
}
SGLANG: dict[str, Format] = {
    "bf16": Format(),
    "fp8 KV cache, e4m3": Format(arguments={"kv_cache_dtype": "fp8_e4m3"}, parts=CACHE),
    "fp8 KV cache, e5m2": Format(arguments={"kv_cache_dtype": "fp8_e5m2"}, parts=CACHE),
}
"""Its kernels for quantised weights want AMX or a GPU, and its processes end where there is none."""
FORMATS = {"vllm": VLLM, "sglang": SGLANG}


def served(form: Format, source: Path, target: Path) -> Path:
    """Return the checkpoint that an engine of a format serves, made of the trainer's weights in bfloat16."""
    if form.compressed is None:
        return source
    config, made = form.compressed
    shutil.copytree(source, target)
    found = json.loads((target / "config.json").read_text(encoding="utf-8"))
    (target / "config.json").write_text(json.dumps(found | {"quantization_config": config}), encoding="utf-8")
    tensors: dict[str, Tensor] = {}
    for name, weight in load_file(source / "model.safetensors").items():
        # Rounded as the trainer's are when they are sent, and quantised then: otherwise the two sides have other grids.
        rounded = weight.bfloat16()
        tensors |= made(name, rounded.float()) if name.endswith("_proj.weight") else {name: rounded}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target
