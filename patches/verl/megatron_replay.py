"""Two places in verl's Megatron engine, which replays by itself: one gets the routes of a batch, one hands them to a router."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from mismatch_ext.patching import Patch


class Guard(Protocol):
    """An observer of the replay, such as `mismatch_ext.adapters.verl.megatron.replay.ReplayGuard`."""

    def batch(self, engine: Any, /, *args: Any, **kwargs: Any) -> AbstractContextManager[None]:
        """Return the context that a batch runs in; takes the arguments of `forward_backward_batch`."""

    def before(self, router: Any) -> None:
        """Raise if the RouterReplay would fall back on its router's own choice."""

    def take_others(self) -> int:
        """Return how many passes since the last call were over other tokens than their routes."""

    def after(self, router: Any, scores: Any, top_k: int, indices: Any, native: Callable[[], Any]) -> None:
        """Look at the expert ids `[T, K]` that the RouterReplay selected for scores `[T, E]`; `native` returns the own choice."""


_UPSTREAM = "https://github.com/verl-project/verl/blob/v0.9.1/verl/{}"


def _guarded_batch(original: Callable[..., Any], guard: Guard) -> Callable[..., Any]:
    @functools.wraps(original, updated=())
    def forward_backward_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        with guard.batch(self, *args, **kwargs):
            return original(self, *args, **kwargs)

    return forward_backward_batch


def _guarded_topk(original: Callable[..., Any], guard: Guard) -> Callable[..., Any]:
    @functools.wraps(original, updated=())
    def get_replay_topk(self: Any, scores: Any, topk: int, *args: Any, **kwargs: Any) -> Any:
        guard.before(self)
        values, indices = original(self, scores, topk, *args, **kwargs)

        def native() -> Any:
            action, self.router_replay_action = self.router_replay_action, None
            try:
                return original(self, scores.detach(), topk, *args, **kwargs)[1]
            finally:
                self.router_replay_action = action

        guard.after(self, scores, topk, indices, native)
        return values, indices

    return get_replay_topk


REPLAYED_BATCH = Patch(
    name="verl/megatron_replayed_batch",
    peer="verl",
    supports=">=0.9.1,<=0.9.1",
    # The model's configuration, the samples' names and their routes are all known here, once per mini-batch and before any of
    # it is reordered, split or sent; `set_router_replay_data`, behind it, has neither names nor counts of tokens.
    target="verl.workers.engine.megatron.transformer_impl:MegatronEngine.forward_backward_batch",
    make=_guarded_batch,
    source_digests=frozenset({"45725fc86fbecc18"}),
    upstream=_UPSTREAM.format("workers/engine/megatron/transformer_impl.py"),
    reason="Rows that an agent loop filled with zeros are replayed as expert 0, K times; nobody looks at an id on the way.",
    not_covered="What happens to routes after this: splitting into micro-batches and packing are verl's own. Rows of padding, "
    "which verl sends to expert 0 under R2. With one expert per token, rows of zeros are routes. Routes of other "
    "layers that are valid ids.",
    remove_when="verl checks the ids of routed_experts before its Megatron engine replays them.",
)

CLOSED_TOPK = Patch(
    name="verl/megatron_closed_topk",
    peer="verl",
    supports=">=0.9.1,<=0.9.1",
    target="verl.utils.megatron.router_replay_patch:RouterReplay.get_replay_topk",
    make=_guarded_topk,
    source_digests=frozenset({"f4309060f5e2afa4"}),
    upstream=_UPSTREAM.format("utils/megatron/router_replay_patch.py"),
    reason="A router without routes chooses for itself, and tokens behind the last row of routes reach no expert, both without "
    "an error.",
    not_covered="megatron-core's own RouterReplay, which verl leaves in place where routers take input_ids. Which micro-batch's "
    "routes a recomputation gets: verl's queue hands them out in the order of the forward passes. A pass of an own loss over as "
    "many other tokens as the micro-batch has, which takes its routes.",
    remove_when="verl raises there instead of routing natively.",
)
