"""Log-probabilities that a transformers model assigns to given tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch every module to evaluation mode and back to the mode that it was in."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def probe_logits(model: nn.Module, token_ids: Tensor, autocast: AbstractContextManager[Any] | None = None) -> Tensor:
    """Return the logits `[N, T, V]` of a forward pass without gradients, dropout or cache.

    Args:
        model: A causal language model.
        token_ids: Tokens `[N, T]`, int64, on the model's device.
        autocast: The trainer's autocast context; None computes in the parameters' own dtype.
    """
    with torch.no_grad(), evaluating(model), autocast or nullcontext():
        return model(input_ids=token_ids, use_cache=False).logits


def score_tokens(model: nn.Module, token_ids: Tensor, autocast: AbstractContextManager[Any] | None = None) -> Tensor:
    """Score fixed token sequences with the trainer's present weights, at temperature 1.

    Args:
        model: A causal language model.
        token_ids: Tokens `[N, T]`, int64, on the model's device.
        autocast: The trainer's autocast context; None computes in the parameters' own dtype.

    Returns:
        Log-probabilities `[N, T-1]`, float64, on the CPU.
    """
    logits = probe_logits(model, token_ids, autocast)[:, :-1]
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    return logprobs.gather(-1, token_ids[:, 1:, None])[..., 0].double().cpu()
