"""Lets TRL's AsyncGRPO run without CUDA, although it uses a CUDA kernel and asks CUDA for its speed."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, ends_q: Tensor, ends_k: Tensor, *_: Any, softmax_scale: float, **__: Any
) -> Tensor:
    """Attend within each segment of a packed row, as flash-attn's function does; queries stand at the end of their keys."""
    groups, parts = query.shape[1] // key.shape[1], []
    for first, last, start, end in zip(
        ends_q[:-1].tolist(), ends_q[1:].tolist(), ends_k[:-1].tolist(), ends_k[1:].tolist(), strict=True
    ):
        q, k, v = (part.transpose(0, 1) for part in (query[first:last], key[start:end], value[start:end]))
        k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
        seen = torch.arange(end - start)[None] <= torch.arange(last - first)[:, None] + (end - start) - (last - first)
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=softmax_scale)
        parts.append(attended.transpose(0, 1))
    return torch.cat(parts)


def on_cpu() -> AbstractContextManager[Any]:
    """Return a context in which TRL's AsyncGRPO runs without CUDA, although it uses a CUDA kernel and asks CUDA for its speed."""
    home = "trl.experimental.async_grpo"
    stack = ExitStack()
    attention = SimpleNamespace(flash_attn_varlen_func=varlen_attention)
    stack.enter_context(mock.patch(f"{home}.packing._flash_attn", lambda: attention))
    stack.enter_context(mock.patch(f"{home}.async_grpo_trainer.get_peak_flops_per_device", lambda *_: None))
    return stack
