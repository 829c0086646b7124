"""The base of recording and replay: a session, which each router asks, and the forward pass in which it asks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from mismatch_ext.routing.tokens import TokenRows


@dataclass(eq=False)
class Forward:
    """One pass through the decoder.

    Args:
        arguments: What the decoder was called with: positional and named.
        tokens: What it is over, or why its arguments do not tell.
        gradients: Whether gradients were on when it began.
        recomputed: Whether it runs again, in a backward pass.
        outer: The pass that it interrupts, if any.
        hits: Times that each layer's router ran.
        chosen: Experts chosen in a layer, until its experts were seen to get them.
        seen: What the session keeps per layer.
    """

    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    tokens: TokenRows | str
    gradients: bool
    recomputed: bool
    outer: Forward | None
    hits: dict[int, int] = field(default_factory=dict)
    chosen: dict[int, Tensor] = field(default_factory=dict)
    seen: dict[int, Tensor] = field(default_factory=dict)


class Session(Protocol):
    """What is done at a router."""

    replays: bool

    def takes(self, forward: Forward) -> bool:
        """Tell, as a pass begins, whether it is this session's; the model runs another one as if there were no session."""

    def select(
        self, layer: int, forward: Forward | None, scores: Tensor, plain: Callable[[], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Return the values and indices of the top-k of `scores`; `forward` is None when a layer is recomputed."""

    def finish(self, forward: Forward) -> None:
        """Take note of a complete pass."""
