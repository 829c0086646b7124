"""Let a model's head compute in float32 while the rest of the model keeps its dtype."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def head_of(model: nn.Module) -> nn.Linear | None:
    """Return the linear layer that maps a model's last hidden states to logits; None if it is not a linear layer."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return head if isinstance(head, nn.Linear) else None


@contextmanager
def in_float32(head: nn.Linear | None) -> Iterator[None]:
    """Let a head multiply in float32, outside of autocast, as TRL's `cast_lm_head_to_fp32` does.

    Args:
        head: The model's head; its weights keep their dtype, and so does an embedding tied to them. None changes nothing.
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
