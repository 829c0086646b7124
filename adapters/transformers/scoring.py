"""Log-probabilities that a transformers model assigns to given tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

MOST_LOGITS = 2**26
"""Most elements of the logits of a pass: 128 MiB in half precision. A pass over a sharded model gathers all of its weights."""
WIDENED = 2**24
"""Most elements of them that are in float32 at a time: 64 MiB."""

Autocast = Callable[[], AbstractContextManager[Any]]


@contextmanager
def evaluating(model: nn.Module, *, training: bool = False) -> Iterator[None]:
    """Switch every module to evaluation mode, or all to training mode, and afterwards back to the mode that it was in."""
    modes = {module: module.training for module in model.modules()}
    model.train(training)
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def active_dropout(model: nn.Module) -> list[str]:
    """Return the dropouts that act while a model trains, such as `lora_dropout 0.05`, as its modules have them.

    The configuration does not say it: an adapter brings its own, and a trainer may have switched modules off.
    """
    rates = set()
    for path, module in model.named_modules():
        if isinstance(module, nn.Dropout):
            named = [part for part in path.split(".") if not part.isdigit()]
            values = {next((part for part in reversed(named) if "drop" in part), named[-1]): module.p}
        else:
            values = {name: value for name, value in vars(module).items() if name.endswith(("dropout", "_pdrop"))}
        rates |= {(name, value) for name, value in values.items() if isinstance(value, float) and value > 0}
    return [f"{name} {value:g}" for name, value in sorted(rates)]


def probe_logits(model: nn.Module, token_ids: Tensor, autocast: Autocast = nullcontext) -> Tensor:
    """Return the logits `[N, T, V]` of a forward pass without gradients, dropout or cache.

    Args:
        model: A causal language model.
        token_ids: Tokens `[N, T]`, int64, on the model's device.
        autocast: Returns the trainer's autocast context; the default computes in the parameters' own dtype.
    """
    with torch.no_grad(), evaluating(model), autocast():
        logits: Tensor = model(input_ids=token_ids, use_cache=False).logits
    return logits


def logits_width(model: nn.Module) -> int | None:
    """Return the vocabulary size of a model's logits, also where it is the text part's; None if the configuration has none."""
    config = getattr(model, "config", None)
    text = getattr(config, "get_text_config", lambda: config)()  # your own model's configuration may have no parts
    return getattr(text, "vocab_size", None)


def score_tokens(model: nn.Module, token_ids: Tensor, autocast: Autocast = nullcontext) -> Tensor:
    """Score fixed token sequences with the trainer's present weights, at temperature 1.

    Args:
        model: A causal language model.
        token_ids: Tokens `[N, T]`, int64, on the model's device.
        autocast: Returns the trainer's autocast context; the default computes in the parameters' own dtype.

    Returns:
        Log-probabilities `[N, T-1]`, float64, on the CPU.
    """
    # Sequences are scored in chunks, because over a large vocabulary all their logits would take gigabytes.
    width = logits_width(model)
    chunk = 1 if width is None else max(1, MOST_LOGITS // (token_ids.shape[1] * width))
    parts = []
    for rows in torch.split(token_ids, chunk):
        logits = probe_logits(model, rows, autocast)[:, :-1]
        few = max(1, WIDENED // logits[0].numel())
        for some, targets in zip(torch.split(logits, few), torch.split(rows[:, 1:, None], few), strict=True):
            parts.append(torch.log_softmax(some.float(), dim=-1).gather(-1, targets)[..., 0])
    return torch.cat(parts).double().cpu()
