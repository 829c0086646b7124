"""A head that computes in float32 while the rest of a model keeps its dtype."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def head_of(model: nn.Module) -> nn.Linear | None:
    """Return what maps a model's last hidden states to logits; None where that is no linear layer."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return head if isinstance(head, nn.Linear) else None


@contextmanager
def in_float32(head: nn.Linear | None) -> Iterator[None]:
    """Let a head multiply in float32, outside of autocast, as TRL's `cast_lm_head_to_fp32` does; None changes nothing.

    Args:
        head: Of the model; its weights keep their dtype, so that a tied embedding does.
    """
    if head is None:
        yield
        return

    def again(module: nn.Linear, inputs: tuple[Tensor, ...], output: Any) -> Tensor:
        hidden = inputs[0]
        with torch.autocast(hidden.device.type, enabled=False):
            bias = None if module.bias is None else module.bias.float()
            return nn.functional.linear(hidden.float(), module.weight.float(), bias)

    hook = head.register_forward_hook(again)
    try:
        yield
    finally:
        hook.remove()
