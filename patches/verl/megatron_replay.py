"""Two places in verl's Megatron engine, which replays by itself: one gets the routes of a batch, one hands them to a router."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from mismatch_ext.patching import Patch

Guard = Any
"""The handler of both patches, a `mismatch_ext.adapters.verl.megatron.ReplayGuard`."""

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


def _probe(original: Callable[..., Any]) -> str | None:
    """Say what a replay of made-up routes selects instead of them, and a router without routes instead of its own; or None."""
    import torch
    from verl.utils.megatron.router_replay_patch import RouterReplayAction

    scores = torch.tensor([[0.1, 0.2, 0.7]])
    router = SimpleNamespace(
        router_replay_action=RouterReplayAction.REPLAY_FORWARD,
        target_topk_idx=torch.tensor([[1, 0]]),
        target_replay_mask=None,
    )
    values, indices = original(router, scores, 2)
    if indices.tolist() != [[1, 0]] or not torch.equal(values, scores[:, [1, 0]]):
        return f"it replayed the routes [[1, 0]] as {indices.tolist()} with {values.tolist()}."
    router.router_replay_action = None
    chosen = original(router, scores, 2, None, None, lambda scores, top_k, **groups: scores.topk(top_k))[1].tolist()
    return None if chosen == [[2, 1]] else f"a router that is not replayed selects {chosen}, not [[2, 1]]."


def _takes(original: Callable[..., Any]) -> str | None:
    """Say why it cannot be called as verl's workers call it, or return None."""
    try:
        inspect.signature(original).bind("self", "data", "loss_function", forward_only=True)
    except TypeError as error:
        return f"called with (data, loss_function, forward_only), {error}."
    return None


REPLAYED_BATCH = Patch(
    name="verl/megatron_replayed_batch",
    peer="verl",
    supports=">=0.9.1,<=0.9.1",
    # The model's configuration, the samples' names and their routes are all known here, once per mini-batch and before any of
    # it is reordered, split or sent; `set_router_replay_data`, behind it, has neither names nor counts of tokens.
    target="verl.workers.engine.megatron.transformer_impl:MegatronEngine.forward_backward_batch",
    make=_guarded_batch,
    probe=_takes,
    texts=("45725fc86fbecc18",),
    observed="the guard refuses a router that replays outside of a batch whose routes it checked",
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
    probe=_probe,
    texts=("f4309060f5e2afa4",),
    observed="the guard refuses a replayed batch in which a router made no selection through it",
    upstream=_UPSTREAM.format("utils/megatron/router_replay_patch.py"),
    reason="A router without routes chooses for itself, and tokens behind the last row of routes reach no expert, both without "
    "an error.",
    not_covered="megatron-core's own RouterReplay, which verl leaves in place where routers take input_ids. Which micro-batch's "
    "routes a recomputation gets: verl's queue hands them out in the order of the forward passes. A pass of an own loss over as "
    "many other tokens as the micro-batch has, which takes its routes.",
    remove_when="verl raises there instead of routing natively.",
)
