"""Record the input and output of each block of a vLLM engine in this process while it prefills a sequence."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from mismatch_ext.adapters.doctor.blocks import At, blocks_of, hooked
from torch import Tensor, nn

Held = dict[At, tuple[Tensor, Tensor]]


def holding(model: nn.Module, held: Held) -> AbstractContextManager[None]:
    """Keep the first input and output of each block, on the CPU.

    Args:
        model: The engine's model.
        held: Is filled, by layer and kind of block, with input and output `[T, H]`.
    """
    given: dict[At, Tensor] = {}

    def before(at: At) -> Any:
        def hook(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            hidden = named.get("hidden_states")
            if hidden is None:
                hidden = next(part for part in inputs if isinstance(part, Tensor) and part.is_floating_point())
            given.setdefault(at, hidden.detach().cpu().clone())

        return hook

    def after(at: At) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            out = output[0] if isinstance(output, tuple) else output
            held.setdefault(at, (given[at], out.detach().cpu().clone()))

        return hook

    return hooked(blocks_of(model), before, after)
