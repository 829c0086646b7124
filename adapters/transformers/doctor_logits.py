"""The oracle's logits where a large vocabulary forbids to keep them: projected from hidden states whenever they are read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.func import functional_call

# Elements of logits that are kept as they are: 256 MiB in float32.
KEPT = 2**26
# Of the largest logit: more than a head that is applied again rounds otherwise.
NEAR = 1e-4


class Projected:
    """Logits `[N, V]` of hidden states; stretches of rows are computed when they are read, and not kept.

    Args:
        head: Maps hidden states to logits; as it is when rows are read.
        hidden: What the head was given at each token `[N, H]`, on the CPU; in its dtype logits are computed.
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
    """Tell whether a model's logits are what its head says of hidden states: not capped, scaled or shifted after it."""
    with torch.no_grad():
        again = head(hidden)
    return again.shape == logits.shape and bool((again - logits).abs().max() <= NEAR * logits.abs().max())


@contextmanager
def passing_hidden(head: nn.Module) -> Iterator[None]:
    """Let a model return, in the place of its logits, what its head is given."""
    hook = head.register_forward_hook(lambda module, inputs, output: inputs[0])
    try:
        yield
    finally:
        hook.remove()
