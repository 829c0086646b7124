"""Compare each block's output in the engine with the trainer's output for the same input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from mismatch_ext.adapters.transformers.doctor import Scorer
from torch import Tensor, nn

from mismatch_ext.doctor.blocks import At, Block, blocks_of, hooked


def compared(
    scorer: Scorer,
    rows: Sequence[Sequence[int]],
    held: Sequence[Mapping[At, tuple[Tensor, Tensor]]],
) -> list[Block]:
    """Compare an engine's blocks with the trainer's in float32, and the trainer's in the engine's dtype with the same.

    Args:
        scorer: The scorer of the sample; its weights are rounded to the engine's dtype.
        rows: Token ids of each sequence.
        held: For each sequence, the inputs and outputs of the engine's blocks.
    """
    blocks = blocks_of(scorer.model)
    apart: dict[At, list[Tensor]] = {}
    own: dict[At, list[Tensor]] = {}
    for ids, parts in zip(rows, held, strict=True):
        exact = _given(scorer.model, blocks, ids, parts)
        with scorer.cast(scorer.engine_dtype):
            rounded = _given(scorer.model, blocks, ids, parts)
        for at, (_, theirs) in parts.items():
            if at in exact:
                length = exact[at].norm(dim=-1).clamp(min=1e-6)
                apart.setdefault(at, []).append((theirs.float() - exact[at]).norm(dim=-1) / length)
                own.setdefault(at, []).append((rounded[at] - exact[at]).norm(dim=-1) / length)
    return [
        Block(layer=at[0], kind=at[1], error=float(torch.cat(found).median()), own=float(torch.cat(own[at]).median()))
        for at, found in sorted(apart.items())
    ]


def _given(
    model: nn.Module, blocks: Mapping[At, nn.Module], ids: Sequence[int], parts: Mapping[At, tuple[Tensor, Tensor]]
) -> dict[At, Tensor]:
    """Run a model with the inputs of an engine's blocks instead of its own, and return its blocks' outputs `[T, H]`."""
    found: dict[At, Tensor] = {}
    device, dtype = next(model.parameters()).device, next(model.parameters()).dtype
    with _replaced(blocks, {at: given.to(device, dtype) for at, (given, _) in parts.items()}, found), torch.no_grad():
        model(input_ids=torch.tensor([list(ids)], device=device), use_cache=False)
    return found


def _replaced(
    blocks: Mapping[At, nn.Module], given: Mapping[At, Tensor], found: dict[At, Tensor]
) -> AbstractContextManager[None]:
    def before(at: At) -> Any:
        def hook(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
            if "hidden_states" in named:
                return inputs, {**named, "hidden_states": given[at][None]}
            return (given[at][None], *inputs[1:]), named

        return hook

    def after(at: At) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            out = output[0] if isinstance(output, tuple) else output
            found[at] = out.reshape(-1, out.shape[-1]).float().cpu()

        return hook

    return hooked({at: block for at, block in blocks.items() if at in given}, before, after)
