"""What is known of a packed row's tokens, as tensors beside TRL's own.

A row is a tree: tokens that several rollouts begin with are in it once. Shapes: R rows of a micro-batch, one for each rank; in
each row M trained tokens, N tokens that go through the model, B rollouts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from mismatch_ext.adapters.transformers.routing.layout import MoeLayout
from mismatch_ext.adapters.trl.async_grpo.carried import Carried
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mismatch_ext.drift import UNKNOWN
from mismatch_ext.errors import RecordError
from mismatch_ext.routing import RoutingTrace

VERSIONS, ENDED = "mismatch_versions", "mismatch_ended"
ROUTES, ROUTED = "mismatch_routes", "mismatch_routed"


class CarryingCollator:
    """TRL's collator, which also puts tensors of ours in the batch.

    Args:
        inner: TRL's own collator.
        ends: Token ids that a response ends with.
        layout: Routers of the model whose routes are put in the batch; None puts in none.

    Attributes:
        prompts: Token ids of the last micro-batch's prompts.
    """

    def __init__(
        self, inner: Callable[[Any], dict[str, Any]], ends: Sequence[int], layout: MoeLayout | None = None
    ) -> None:
        self.inner, self.ends, self.layout = inner, frozenset(ends), layout
        self.prompts: list[tuple[int, ...]] = []

    def __call__(self, examples: Any) -> dict[str, Any]:
        """Return the batch of a list that holds one micro-batch, which is a list of rows."""
        batch = self.inner(examples)
        (rows,) = examples
        self.prompts = list(dict.fromkeys(_prompt(sample) for row in rows for sample in row.samples))
        batch[VERSIONS] = _padded([versions_of(row) for row in rows], UNKNOWN)
        batch[ENDED] = _padded([torch.tensor([self._ended(sample) for sample in row.samples]) for row in rows], UNKNOWN)
        if self.layout is not None:
            laid = [routes_of(row, self.layout) for row in rows]
            batch[ROUTES] = pad_sequence([routes for routes, _ in laid], batch_first=True)
            batch[ROUTED] = _padded([steps for _, steps in laid], UNKNOWN)
        return batch

    def _ended(self, sample: dict[str, Any]) -> int:
        return int(int(sample["input_ids"][-1]) in self.ends)


def _prompt(sample: dict[str, Any]) -> tuple[int, ...]:
    """Return the tokens before the first one that the policy has sampled."""
    first = int(np.argmax(sample["completion_mask"]))
    return tuple(sample["input_ids"][:first].tolist())


def carried(sample: dict[str, Any]) -> Carried:
    """Return what a rollout carries.

    Raises:
        RecordError: It carries nothing, or versions of another number of tokens.
    """
    found = sample["metrics"]
    if not isinstance(found, Carried) or len(found.versions) != len(sample["input_ids"]):
        raise RecordError(
            "a rollout came without the versions of its tokens: something between the rollout worker and the collator has "
            "replaced its metrics or its tokens. Hand both on as they are."
        )
    return found


def versions_of(row: Any) -> Tensor:
    """Return the versions `[M]` of a row's trained tokens, in the order of TRL's `token_index`."""
    parts = []
    for sample in row.samples:
        trained = np.asarray(sample["completion_mask"], dtype=bool).copy()
        trained[0] = False  # nothing predicts the first token
        parts.append(carried(sample).versions[trained])
    return torch.from_numpy(np.concatenate(parts))


def routes_of(row: Any, layout: MoeLayout) -> tuple[Tensor, Tensor]:
    """Return the routes of a row's tokens in the order in which the tokens are packed, and the versions of the routes.

    A token that several rollouts share gets the routes of the newest weights among them, because those weights have sampled the
    newest tokens after it.

    Args:
        row: TRL's row, with rollouts in it.
        layout: Routers of the model.

    Returns:
        Experts `[N, L, K]`, int64, and versions `[N]`, `UNKNOWN` where there is no route.

    Raises:
        RecordError: A rollout has no routes.
        RoutingError: A rollout's routes are not of its tokens.
    """
    nodes = packed_nodes(row)
    place = {node: at for at, node in enumerate(nodes)}
    # A token without a route gets any valid experts here, because the model routes it itself.
    found = torch.arange(layout.top_k).expand(len(nodes), len(layout.layers), -1).clone()
    steps = torch.full((len(nodes),), UNKNOWN, dtype=torch.int64)
    for number, (sample, path) in enumerate(zip(row.samples, row.sample_nodes, strict=True)):
        own = carried(sample)
        if own.routes is None:
            raise RecordError(
                f"mismatch.routing.mode='R3': rollout {number} of a row came without routes. Start the server with "
                "--enable-return-routed-experts."
            )
        trace = RoutingTrace.ingest(
            own.routes, num_experts=layout.num_experts, layers=layout.layers, top_k=layout.top_k, last_row=False,
            tokens=torch.as_tensor(sample["input_ids"]), version=own.routes_step, request=f"rollout {number} of a row",
        )  # fmt: skip
        routes = trace.experts.to(torch.int64)
        at = torch.tensor([place[node] for node in path[: len(routes)]], dtype=torch.int64)
        newer = steps[at] < own.routes_step
        found[at[newer]], steps[at[newer]] = routes[newer], own.routes_step
    return found, steps


def packed_nodes(row: Any) -> list[int]:
    """Return the number of the tree's node at each packed position, by letting TRL pack these numbers instead of tokens."""
    tokens, row.tokens = row.tokens, list(range(len(row.tokens)))
    try:
        nodes: list[int] = row.pack()["input_ids"].tolist()
    finally:
        row.tokens = tokens
    return nodes


def _padded(parts: Sequence[Tensor], filler: int) -> Tensor:
    return pad_sequence(list(parts), batch_first=True, padding_value=filler)
