"""The output head of a transformers model in float32, outside of autocast, as TRL's `cast_lm_head_to_fp32` computes it.

Weights and hidden states are taken as they are. An engine whose weights are coarser multiplies rounded ones in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from mismatch_ext.adapters.transformers.scoring import Autocast
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mismatch_ext.errors import ConfigError


def head_of(model: nn.Module) -> nn.Linear | None:
    """Return the linear layer that maps a model's last hidden states to logits; None if it is not a linear layer."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return head if isinstance(head, nn.Linear) else None


def float32_logits(head: nn.Linear, hidden: Tensor) -> Tensor:
    """Return a head's logits of hidden states, multiplied in float32 outside of autocast; its weights keep their dtype."""
    with torch.autocast(hidden.device.type, enabled=False):
        bias = None if head.bias is None else head.bias.float()
        return nn.functional.linear(hidden.float(), head.weight.float(), bias)


def plain_logits(head: nn.Linear, hidden: Tensor) -> Tensor:
    """Return a head's logits of hidden states as a linear layer computes them, under autocast if it is on."""
    return nn.functional.linear(hidden, head.weight, head.bias)


@contextmanager
def in_float32(head: nn.Linear | None, *, exact: bool = True) -> Iterator[None]:
    """Let a head multiply in float32, outside of autocast; not `exact`, let it multiply as a linear layer does."""
    if head is None:
        yield
        return
    logits = float32_logits if exact else plain_logits

    def again(module: nn.Linear, inputs: tuple[Tensor, ...], output: Any) -> Tensor:
        return logits(module, inputs[0])

    hook = head.register_forward_hook(again)
    try:
        yield
    finally:
        hook.remove()


def keep_in_float32(model: nn.Module) -> None:
    """Let a model's head multiply in float32 from now on, in every pass through it.

    Raises:
        ConfigError: The model has no linear head, or an adapter has taken its place.
    """
    head = head_of(model)
    if head is None:
        raise ConfigError(
            f"mismatch.precision.head: the output head of {type(model).__name__} is not a linear layer, as under an adapter, so "
            "that it cannot be set to float32. Leave out mismatch.precision.head, and adapters on the head."
        )
    head.forward = partial(float32_logits, head)  # type: ignore[method-assign]


@torch.no_grad()
def read_head(model: nn.Module, autocast: Autocast) -> str | None:
    """Return the dtype that a model's output head has its products in; None if it cannot run by itself.

    Args:
        model: A causal language model.
        autocast: Returns the trainer's autocast context.
    """
    head = head_of(model)
    if head is None or isinstance(head.weight, DTensor) or head.weight.is_meta:
        return None
    if not head.weight.is_floating_point():  # it is quantized
        return None
    if head.weight.shape != (head.out_features, head.in_features):  # a rank's part of it
        return None
    hidden = torch.ones(1, head.in_features, dtype=head.weight.dtype, device=head.weight.device)
    # As with autocast itself: the dtype of a product that was really computed, because flags can lie.
    with autocast():
        logits: Tensor = head(hidden)
    return str(logits.dtype).removeprefix("torch.")
