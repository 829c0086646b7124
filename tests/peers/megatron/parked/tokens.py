"""Which tokens a megatron-core model is called with: what a replayed pass has to prove about itself.

Shapes: B batch, S positions, R = B * S rows, batch-first.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mismatch_ext.routing.tokens import ASTRAY, TokenRows, token_rows


def pass_tokens(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TokenRows | str | None:
    """Return the tokens of a forward pass, or why its arguments do not tell them; None where an earlier stage is the one to know.

    Args:
        model: The model around a decoder, a GPTModel.
        args: Its positional arguments.
        kwargs: Its named ones.
    """
    given = dict(zip(_parameters(type(model)), args, strict=False)) | kwargs
    ids, mask, packed = (given.get(name) for name in ("input_ids", "attention_mask", "packed_seq_params"))
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        first = getattr(model, "pre_process", True)
        return "it was given no input_ids [B, S] (decoder_input of something else?)" if first else None
    for name in ("decoder_input", "inference_context", "inference_params"):
        if given.get(name) is not None and getattr(model, "pre_process", True):
            return f"it was given {name} beside its input_ids"
    if packed is not None:
        return _packed(ids, packed)
    places = given.get("position_ids") if getattr(model, "position_embedding_type", "") == "learned_absolute" else None
    if mask is None:
        return token_rows(ids, None, places)
    if mask.dim() != 4 or mask.shape[-2:] != (ids.shape[1], ids.shape[1]) or mask.dtype != torch.bool:
        return f"its attention_mask is {mask.dtype} {tuple(mask.shape)}, not bool [B, 1, S, S], so what a token sees is not known"
    return _masked(ids, mask, places)


def _packed(ids: Tensor, packed: Any) -> TokenRows | str:
    """Read a packed row `[1, T]`, whose sequences begin where its cumulated lengths say."""
    lengths = getattr(packed, "cu_seqlens_q_padded", None)
    lengths = packed.cu_seqlens_q if lengths is None else lengths
    if lengths is None or ids.shape[0] != 1:
        return "its packed_seq_params have no cu_seqlens_q, or its input_ids are not one row [1, T]"
    begins = torch.zeros(ids.shape[1] + 1, dtype=torch.bool, device=ids.device)
    begins[lengths.to(device=ids.device, dtype=torch.int64)] = True
    return replace(token_rows(ids), starts=begins[:-1])


def _masked(ids: Tensor, mask: Tensor, places: Tensor | None) -> TokenRows:
    """Read a batch with a mask of what a token does not see `[B, 1, S, S]`: itself and all tokens before it, and no padding."""
    size = ids.shape[1]
    hidden = mask[:, 0].expand(len(ids), size, size)
    real = ~hidden.diagonal(dim1=1, dim2=2)
    causal = torch.ones(size, size, dtype=torch.bool, device=ids.device).tril()
    astray = real & (hidden != ~(causal & real[:, None])).any(2)
    found = token_rows(torch.where(astray, ASTRAY, ids), real, places)
    # Where padding comes last, the mask need not leave it out.
    return replace(found, masked=False)


def _parameters(kind: type[Any]) -> tuple[str, ...]:
    return _names(kind.forward)


@cache
def _names(forward: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)[1:]
