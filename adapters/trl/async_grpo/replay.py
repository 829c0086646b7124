"""Replay of routes over TRL's packed tree, in which some rollouts are of older weights than those that train."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from mismatch_ext.adapters.transformers import routing as backend
from torch import Tensor, nn

from mismatch_ext.config import RoutingConfig
from mismatch_ext.drift import UNKNOWN
from mismatch_ext.ranks import Ranks
from mismatch_ext.routing import RoutingTrace, storage_dtype
from mismatch_ext.routing.replay import RouteReplay
from mismatch_ext.routing.tokens import token_rows
from mismatch_ext.routing.trace import run_lengths


class TreeReplay(RouteReplay):
    """Replays the routes of a packed row; only routes of the weights that train now are compared with the model's own choice.

    Args:
        config: The `routing` section.
        model: The trainer's model.
        seed: The trainer's own, `args.seed`.
        ranks: The processes that train together.
        step: Returns the version of the weights that train.

    Raises:
        ReplayError: The model's routing cannot be replayed.
    """

    def __init__(
        self, config: RoutingConfig, model: nn.Module, *, seed: int, ranks: Ranks, step: Callable[[], int]
    ) -> None:
        super().__init__(config, backend, model, seed=seed, ranks=ranks)
        self._step = step

    @contextmanager
    def over_tree(self, model: nn.Module, kwargs: Mapping[str, Any], ids: Tensor, steps: Tensor) -> Iterator[None]:
        """Run the forward pass of a packed row under its routes.

        Args:
            model: The model, possibly wrapped.
            kwargs: Arguments that TRL gives the model.
            ids: Experts of each position `[N, L, K]`, int64.
            steps: Version of the weights that chose the experts `[N]`; `UNKNOWN` where the model routes a token itself.

        Raises:
            RoutingError: The routes cannot be this model's.
            ReplayError: The forward pass did not obey the routes.
        """
        # For a forward pass, a position that does not follow the one before it begins a new sequence.
        packed = token_rows(kwargs["input_ids"], None, kwargs["position_ids"])
        trace = RoutingTrace(
            parts=(ids.to(storage_dtype(self.layout.num_experts)),),
            layers=self.layout.layers,
            num_experts=self.layout.num_experts,
            versions=run_lengths(enumerate(steps.clamp(min=0).tolist())),
            tokens=packed.ids.to(torch.int32),
            starts=packed.starts,
        )
        real = torch.ones_like(steps, dtype=torch.bool)
        with self.replaying(model, trace, steps != UNKNOWN, real=real, split="train"):
            yield

    def _checkable(self, trace: RoutingTrace, mask: Tensor) -> Tensor:
        """Return which recorded rows `[N]` are of the weights that train, because other weights choose other experts."""
        return mask & (trace.version_by_row().to(mask.device) == self._step())
