"""Record the experts that a transformers model chooses.

Shapes: R rows (tokens of a forward pass, batch-first), L MoE layers, K experts per token, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from mismatch_ext.adapters.transformers.routing.binding import Binding
from mismatch_ext.adapters.transformers.routing.layout import MoeLayout
from mismatch_ext.adapters.transformers.routing.session import Forward
from torch import Tensor, nn

from mismatch_ext.errors import ReplayError
from mismatch_ext.routing import RoutingTrace, storage_dtype
from mismatch_ext.routing.tokens import TokenRows


class Recording:
    """Routes of the forward passes under `record_routing`.

    Args:
        layout: The model's routers.
        version: Version of the policy that runs.
    """

    replays = False

    def __init__(self, layout: MoeLayout, version: int = 0) -> None:
        self.layout = layout
        self._dtype = storage_dtype(layout.num_experts)
        self._version = version
        self._parts: list[Tensor] = []
        self._tokens: list[TokenRows | str] = []

    @property
    def trace(self) -> RoutingTrace:
        """Routes of all forward passes so far, in order, rows of a pass batch-first.

        Raises:
            ReplayError: Nothing was recorded.
        """
        return self._trace(self._parts, self._tokens)

    @property
    def passes(self) -> list[RoutingTrace]:
        """Routes of each forward pass in a trace of its own, in order."""
        return [self._trace([part], [tokens]) for part, tokens in zip(self._parts, self._tokens, strict=True)]

    def _trace(self, parts: list[Tensor], tokens: list[TokenRows | str]) -> RoutingTrace:
        if not parts:
            raise ReplayError(
                f"{self.layout.family}: no forward pass was recorded. Was the model built anew, or a copy of it called?"
            )
        known = [rows for rows in tokens if isinstance(rows, TokenRows)]
        tokens_of_all = starts_of_all = None
        if len(known) == len(parts):
            tokens_of_all = torch.cat([rows.ids.to(torch.int32) for rows in known])
            starts_of_all = torch.cat([rows.starts for rows in known])
        return RoutingTrace(
            parts=tuple(parts),
            layers=self.layout.layers,
            num_experts=self.layout.num_experts,
            versions=((0, self._version),),
            tokens=tokens_of_all,
            starts=starts_of_all,
        )

    def takes(self, forward: Forward) -> bool:
        """Accept every pass."""
        return True

    def select(
        self, layer: int, forward: Forward | None, scores: Tensor, plain: Callable[[], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Let the router choose, and remember its choice."""
        values, indices = plain()
        if forward is not None:
            self.keep(layer, forward, indices)
        return values, indices

    def keep(self, layer: int, forward: Forward, indices: Tensor) -> None:
        """Remember the choice of a layer."""
        forward.seen[layer] = indices.detach().reshape(-1, self.layout.top_k).to(self._dtype)

    def finish(self, forward: Forward) -> None:
        """Keep the routes of a complete pass, all layers in one tensor, and its tokens."""
        self._parts.append(self.routes(forward))
        self._tokens.append(forward.tokens)

    def routes(self, forward: Forward) -> Tensor:
        """Return the experts chosen in a pass `[R, L, K]`, layers in the order of the layout."""
        return torch.stack([forward.seen[layer] for layer in self.layout.layers], dim=1)


@contextmanager
def record_routing(model: nn.Module, *, version: int = 0) -> Iterator[Recording]:
    """Record the experts of every forward pass of a model, without changing what it computes.

    Args:
        model: A transformers model, possibly wrapped (PEFT, DDP, FSDP).
        version: Version of the policy that runs, for the trace.

    Yields:
        The recording; `recording.trace` afterwards. Recomputation in a backward pass is not recorded again.

    Raises:
        ReplayError: The model's routing cannot be recorded (names family, module and reason), or a forward pass did not run
            each layer's router exactly once.
    """
    binding = Binding.of(model)
    recording = Recording(binding.layout, version)
    with binding.active(recording):
        yield recording
