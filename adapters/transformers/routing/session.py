"""The base of recording and replay: a session, which every router asks, and the forward pass in which the router asks."""

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
        arguments: The decoder's arguments, positional and named.
        tokens: The tokens of the pass, or why the decoder's arguments do not tell them.
        gradients: Whether gradients were on when the pass began.
        recomputed: Whether it runs again, in a backward pass.
        outer: The pass that it interrupts, if any.
        hits: By layer, how often the router ran.
        chosen: By layer, the ids that the router chose; removed once its experts were seen to get them.
        seen: By layer, what the session keeps.
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
    """Decides what happens at a router."""

    replays: bool

    def takes(self, forward: Forward) -> bool:
        """Tell, when a pass begins, whether it is this session's; the model runs any other pass as if there were no session."""

    def select(
        self, layer: int, forward: Forward | None, scores: Tensor, plain: Callable[[], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Return the values and indices of the top-k of `scores`; `forward` is None when a layer is recomputed."""

    def finish(self, forward: Forward) -> None:
        """Note that a pass is complete."""
