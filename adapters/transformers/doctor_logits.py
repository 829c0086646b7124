"""The oracle's logits if they are too large to keep: hidden states are projected to logits whenever these are read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.func import functional_call

# Most elements of logits that are kept: 256 MiB in float32.
KEPT = 2**26
# A share of the largest logit; applying a head again changes logits by less than this, through rounding.
NEAR = 1e-4


class Projected:
    """Logits `[N, V]` of hidden states; slices of rows are computed when they are read, and not kept.

    Args:
        head: Maps hidden states to logits, with the weights that it has when rows are read.
        hidden: The head's input at each token `[N, H]`, on the CPU; logits are computed in its dtype.
        width: V.
    """

    def __init__(self, head: nn.Module, hidden: Tensor, width: int) -> None:
        self._head, self._hidden = head, hidden
        self.shape = torch.Size((len(hidden), width))

    def __len__(self) -> int:
        return len(self._hidden)

    def __getitem__(self, rows: slice) -> Tensor:
        weights = {name: weight.to(self._hidden.dtype) for name, weight in self._head.named_parameters()}
        device = next(iter(weights.values())).device
        with torch.no_grad():
            logits: Tensor = functional_call(self._head, weights, self._hidden[rows].to(device))
        return logits.cpu()


def is_head(head: nn.Module, hidden: Tensor, logits: Tensor) -> bool:
    """Tell whether a model's logits are its head's output for hidden states, not capped, scaled or shifted after the head."""
    with torch.no_grad():
        again = head(hidden)
    return again.shape == logits.shape and bool((again - logits).abs().max() <= NEAR * logits.abs().max())


@contextmanager
def passing_hidden(head: nn.Module) -> Iterator[None]:
    """Let a model return the input of its head instead of its logits."""
    hook = head.register_forward_hook(lambda module, inputs, output: inputs[0])
    try:
        yield
    finally:
        hook.remove()
