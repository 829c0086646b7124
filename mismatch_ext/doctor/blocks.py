"""Where in the network an engine first computes otherwise: each block given the engine's own input, with no list of causes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

# Names of a layer's blocks, in engines and in transformers.
KINDS = {"self_attn": "attention", "mlp": "mlp"}
At = tuple[int, str]
# How many times a block of the engine has to err as much as the trainer's in the engine's dtype, to stand out.
STANDS_OUT = 2.0
# Relative error of float32.
FLOOR = 1e-6


@dataclass(frozen=True, kw_only=True)
class Block:
    """One block of the network.

    Args:
        layer: Its number.
        kind: "attention" or "mlp".
        error: Median over tokens of the length of engine less trainer in float32, over the trainer's; given the engine's input.
        own: The same of the trainer in the engine's dtype: rounding.
    """

    layer: int
    kind: str
    error: float
    own: float

    @property
    def ratio(self) -> float:
        """The engine's error in units of rounding's: about 1 where the block is the trainer's."""
        return self.error / max(self.own, FLOOR)


def blocks_of(model: nn.Module) -> dict[At, nn.Module]:
    """Return the blocks of a decoder by their layer and kind; nothing for a model whose layers have other names."""
    lists = [m for name, m in model.named_modules() if name.endswith("layers") and isinstance(m, nn.ModuleList)]
    return {
        (number, kind): block
        for number, layer in enumerate(lists[0] if lists else ())
        for name, kind in KINDS.items()
        if isinstance(block := getattr(layer, name, None), nn.Module)
    }


@contextmanager
def hooked(
    blocks: Mapping[At, nn.Module],
    before: Callable[[At], Callable[..., Any]],
    after: Callable[[At], Callable[..., Any]],
) -> Iterator[None]:
    """Hook blocks for a while.

    Args:
        blocks: By layer and kind.
        before: Makes the hook before a block's forward, which is given keyword arguments, too.
        after: Makes the one after it.
    """
    hooks = []
    for at, block in blocks.items():
        hooks.append(block.register_forward_pre_hook(before(at), with_kwargs=True))
        hooks.append(block.register_forward_hook(after(at)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def said(blocks: Sequence[Block]) -> str:
    """Return what a table of blocks says, in one line."""
    most = max(blocks, key=lambda block: block.ratio)
    if most.ratio < STANDS_OUT:
        return "no block stands out: what differs is outside of attention and mlp, or in the decode"
    out = [block for block in blocks if block.ratio >= STANDS_OUT]
    kinds = [kind for kind in dict.fromkeys(block.kind for block in blocks) if _all_of(kind, blocks)]
    where = f"; all of {' and '.join(kinds)}" if kinds else f"; {len(out)} of {len(blocks)} blocks"
    return f"largest at layer {most.layer}, {most.kind}: {most.ratio:.1f} of rounding's{where}"


def _all_of(kind: str, blocks: Sequence[Block]) -> bool:
    ratios = [block.ratio for block in blocks if block.kind == kind]
    return len(ratios) > 1 and min(ratios) >= STANDS_OUT
