"""vLLM's quantised linear layers: without the rounding of what goes into them, and what that rounding does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import vllm._custom_ops as ops
from mismatch_ext.adapters.vllm.engine import runner
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import linear
from vllm import LLM
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8

from benchmarks.quantised.formats import Round, fp8_tokens, int8_tokens

OTHERWISE = "rounded otherwise than by the formula"


class WholeInputs:
    """Takes the place of a layer's `quant_method`: its quantised weights, and what goes into it as it is.

    The product is summed in float32 and rounded once to the compute dtype, as the kernels do.

    Args:
        weight: What the stored weights stand for, float32 `[out, in]`.
    """

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the layer's output."""
        return linear(x.float(), self._weight, None if bias is None else bias.float()).to(x.dtype)


@contextmanager
def whole_inputs(llm: LLM, checkpoint: Path) -> Iterator[None]:
    """Let an engine's quantised layers take what goes into them as it is.

    Args:
        llm: The engine.
        checkpoint: What it serves; holds the integers and scales of layers whose weights oneDNN has packed.
    """
    model = runner(llm).model
    tensors, kept = load_file(checkpoint / "model.safetensors"), {}
    for name, layer in model.named_modules():
        if isinstance(layer, LinearBase) and not type(layer.quant_method).__name__.startswith("Unquantized"):
            kept[layer] = layer.quant_method
            layer.quant_method = WholeInputs(held(layer, name, tensors, model.packed_modules_mapping))
    assert kept, "no linear layer is quantised"
    try:
        yield
    finally:
        for layer, method in kept.items():
            layer.quant_method = method


def held(layer: Any, name: str, tensors: dict[str, Tensor], packed: dict[str, list[str]]) -> Tensor:
    """Return what a layer's stored weights stand for, `[out, in]`: read off the layer, or off what was packed into it."""
    if getattr(layer.weight, "dtype", None) == torch.float8_e4m3fn:
        return (layer.weight.t().float() * layer.weight_scale.view(-1, 1)).contiguous()
    path, _, own = name.rpartition(".")
    parts = [f"{path}.{part}.weight" for part in packed.get(own, [own])]
    return torch.cat([tensors[part].float() * tensors[f"{part}_scale"].view(-1, 1) for part in parts])


@contextmanager
def compared_inputs() -> Iterator[dict[str, int]]:
    """Count the values that go into quantised layers, and those that vLLM's own rounding and ours leave as different values."""
    found = {"values": 0, OTHERWISE: 0}

    def counted(x: Tensor, integers: Tensor, scale: Tensor, rounded: Round) -> None:
        engine = integers[: len(x)].float() * scale.view(len(x), 1)
        found["values"] += x.numel()
        # A last bit of the product with the scale is no other rounding.
        step = (engine - rounded(x.float())).abs() > 1e-5 * engine.abs() + 1e-12
        found[OTHERWISE] += int(step.sum())

    fp8_quant, int8_quant = QuantFP8.__call__, ops.onednn_scaled_int8_quant

    def as_fp8(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = fp8_quant(self, x, *args, **kwargs)
        counted(x, *answer[:2], fp8_tokens)
        return answer

    def as_int8(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = int8_quant(x, *args, **kwargs)
        counted(x, *answer[:2], int8_tokens)
        return answer

    with (
        mock.patch.object(QuantFP8, "__call__", as_fp8),
        mock.patch.object(ops, "onednn_scaled_int8_quant", as_int8),
    ):
        yield found
