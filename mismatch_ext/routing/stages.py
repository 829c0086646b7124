"""How far replayed routes differ from those that the model would have chosen, where a rank has a stage of a pipeline.

It has the layers of its stage, and of a layer the tokens of its data shard; what is logged is over all of them.

Shapes: T tokens of a forward pass on this rank, K experts per token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mismatch_ext.config import RoutingConfig
from mismatch_ext.ranks import gathered
from mismatch_ext.routing.agreement import Agreement, agreement
from mismatch_ext.routing.ingest import storage_dtype
from mismatch_ext.routing.replaying import MeasuredPasses
from mismatch_ext.routing.trace import RoutingTrace

Layers = tuple[int, ...]


class RouteAgreement:
    """Compares routes in a share of the batches that are replayed, the same ones on every rank.

    Args:
        config: The `routing` section.
        seed: The engine's; the same on every rank.
        twin: Whether another rank has the same tokens and layers, and counts them.

    Attributes:
        active: Whether the batch that runs is compared.
        draws: Which batches are.
    """

    def __init__(self, config: RoutingConfig, seed: int, *, twin: bool = False) -> None:
        self.draws = MeasuredPasses(config, seed)
        self.active = False
        self._twin = twin
        self._passes: dict[Layers, dict[int, tuple[Tensor, Tensor, Tensor]]] = {}
        self._found: dict[Layers, Agreement] = {}

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Draw whether a batch is compared, while it runs."""
        self.active = self.draws.agreement()
        try:
            yield
        finally:
            self.active = False
            self._passes.clear()  # what a pass that failed has left

    def compare(
        self, layers: Layers, layer: int, recorded: Tensor, native: Tensor, mask: Tensor | None, experts: int
    ) -> None:
        """Take the routes of a layer in a forward pass; of a pass over all layers they are compared.

        Args:
            layers: MoE layers of the model chunk that runs.
            layer: One of them.
            recorded: What is replayed `[T, K]`.
            native: What the router would have chosen `[T, K]`.
            mask: True where there is a recorded route `[T]`; None where all are but for padding, whose rows are zeros.
            experts: Per layer.
        """
        if mask is None:
            if recorded.shape[1] == 1:
                return  # zero is a route, too: padding cannot be told
            mask = recorded.any(1)
        kind = storage_dtype(experts)
        one = self._passes.setdefault(layers, {})
        one[layer] = (recorded.to(native.device, kind), native.to(kind), mask.to(native.device).bool())
        if len(one) < len(layers):
            return
        parts = [one[index] for index in layers]
        del self._passes[layers]
        theirs, own = (
            RoutingTrace(parts=(torch.stack([part[side] for part in parts], 1),), layers=layers, num_experts=experts)
            for side in (0, 1)
        )
        mask = parts[0][2]
        found = agreement(theirs, own, mask, real=mask)
        self._found[layers] = self._found[layers].merge(found) if layers in self._found else found

    def metrics(self) -> dict[str, float]:
        """Return the agreement since the last call, over all ranks, which must all call this."""
        mine, self._found = {} if self._twin else self._found, {}
        merged: dict[Layers, Agreement] = {}
        for found in gathered({layers: one.state_dict() for layers, one in mine.items()}):
            for layers, state in found.items():
                one = Agreement.from_state(state)
                merged[layers] = merged[layers].merge(one) if layers in merged else one
        return of_stages(merged)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run goes on with, as JSON-able data: it compares the same batches."""
        return self.draws.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self.draws.load_state_dict(state)


def of_stages(found: Mapping[Layers, Agreement]) -> dict[str, float]:
    """Return what to log of the agreement of the stages of a pipeline, which have seen the same tokens.

    Which rows have no route is not told from padding here, and how many tokens differ in any layer is known within one stage
    alone: there are no such figures.

    Args:
        found: By the layers of each stage.
    """
    if not found:
        return {}
    stages = [found[layers] for layers in sorted(found)]
    whole = Agreement(
        layers=tuple(index for one in stages for index in one.layers),
        tokens=max(one.tokens for one in stages),
        set_mismatches=tuple(count for one in stages for count in one.set_mismatches),
        order_agreements=tuple(count for one in stages for count in one.order_agreements),
        token_mismatches=max(one.token_mismatches for one in stages),
    )
    unknown = {"routing/native_rows_frac"} | ({"routing/token_mismatch_frac"} if len(stages) > 1 else set())
    values = {**whole.metrics(), **whole.layer_metrics()}
    return {name: value for name, value in values.items() if name not in unknown}
