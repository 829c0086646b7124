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
        held: Is filled, by layer and name of block, with input and output `[T, H]`.
    """
    given: dict[At, tuple[Tensor, Tensor | None]] = {}

    def before(at: At) -> Any:
        def hook(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            floats = [part for part in inputs if isinstance(part, Tensor) and part.is_floating_point()]
            hidden = named.get("hidden_states", floats[0] if floats else None)
            # Some blocks return nothing and write into their last argument.
            written = named.get("output", floats[-1] if floats else None)
            if hidden is not None and at not in given:
                given[at] = (hidden.detach().cpu().clone(), written)

        return hook

    def after(at: At) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if at in held or at not in given:
                return
            hidden, written = given[at]
            out = written if output is None else output[0] if isinstance(output, tuple) else output
            if isinstance(out, Tensor):
                held[at] = (hidden, out.detach().cpu().clone())

        return hook

    return hooked(blocks_of(model), before, after)
