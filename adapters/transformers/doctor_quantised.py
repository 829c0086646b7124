"""Round weights, activations and caches as quantisation does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from mismatch_ext.adapters.transformers.doctor_changes import RoundedInputs, weights
from torch import Tensor, nn

Round = Callable[[Tensor], Tensor]
# Formats of a KV cache, by their names.
FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
FP8_LARGEST, INT8_LARGEST, INT4_LARGEST = 448.0, 127.0, 7.0


def quantised(model: nn.Module, rounded: Round) -> dict[str, Tensor]:
    """Return the rounded weights of linear layers and experts, by name; the head is not quantised."""
    linear = {f"{n}.weight" for n in linear_layers(model)}
    kept = {n: p for n, p in model.named_parameters() if n in linear or p.dim() == 3}
    # Each half is rounded by itself: checkpoints hold gate and up of an expert apart, but transformers holds them as one matrix.
    return {
        name: torch.cat([rounded(part) for part in p.detach().chunk(2, 1)], 1)
        if "gate_up" in name
        else rounded(p.detach())
        for name, p in kept.items()
    }


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Return a model's linear layers by name, without the head."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head}


@contextmanager
def with_int8_activations(model: nn.Module) -> Iterator[None]:
    """Round linear layers to int8 with a scale for each output channel, and their inputs with a scale for each token."""
    chosen = {id(m.weight): n for n, m in linear_layers(model).items()}
    with weights(model, {f"{n}.weight": int8(m.weight.detach()) for n, m in linear_layers(model).items()}):
        with RoundedInputs(chosen, int8):
            yield


def int8(x: Tensor) -> Tensor:
    """Round to int8, symmetrically, with a scale for each row."""
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / INT8_LARGEST
    return (x / scale).round().clamp(-INT8_LARGEST, INT8_LARGEST) * scale


def int4(size: int) -> Round:
    """Return symmetric rounding to 4 bits, with a scale for each group of `size` inputs; other widths stay as they are."""

    def rounded(weight: Tensor) -> Tensor:
        if weight.shape[-1] % size:
            return weight
        groups = weight.reshape(-1, size)
        scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-12) / INT4_LARGEST
        return ((groups / scale).round().clamp(-INT4_LARGEST - 1, INT4_LARGEST) * scale).reshape(weight.shape)

    return rounded


def fp8(weight: Tensor) -> Tensor:
    """Round to fp8 (e4m3), with a scale for each matrix."""
    scale = weight.abs().amax((-2, -1), keepdim=True).clamp(min=1e-12) / FP8_LARGEST
    return (weight / scale).to(torch.float8_e4m3fn).to(weight.dtype) * scale


def cached(kind: torch.dtype, *, truncated: bool = False) -> Round:
    """Return the rounding of a cache in an 8-bit float, to the nearest value or towards zero."""

    def rounded(x: Tensor) -> Tensor:
        nearest = x.bfloat16().to(kind)
        if not truncated:
            return nearest.to(x.dtype)
        over = nearest.to(x.dtype).abs() > x.bfloat16().to(x.dtype).abs()
        # These formats are sign and magnitude, so subtracting 1 from the bits is one step towards zero.
        lower = (nearest.view(torch.uint8) - 1).view(kind)
        return torch.where(over, lower.to(x.dtype), nearest.to(x.dtype))

    return rounded
