"""Logits of the completion tokens, from a model's own forward."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def completion_logits(model: Any, input_ids: Tensor, attention_mask: Tensor, completion_length: int) -> Tensor:
    """Return the logits that predict each completion token.

    Args:
        model: A causal language model, possibly wrapped for distributed training.
        input_ids: Prompt and completion `[B, S]`, int64.
        attention_mask: 1 for tokens that are not padding `[B, S]`.
        completion_length: T, the number of completion tokens at the end of each row.

    Returns:
        Logits `[B, T, V]` in the dtype that the model computes them in, with their graph unless gradients are off.
    """
    output = model(
        input_ids=input_ids, attention_mask=attention_mask, logits_to_keep=completion_length + 1, use_cache=False
    )
    logits: Tensor = output.logits
    return logits[:, :-1]
