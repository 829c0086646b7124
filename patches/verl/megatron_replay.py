"""Where verl's Megatron engine, which replays by itself, hands a router its routes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from mismatch_ext.patching import Patch

Guard = Any
"""The handler, a `mismatch_ext.adapters.verl.megatron.ReplayGuard`."""


def _guarded_topk(original: Callable[..., Any], guard: Guard) -> Callable[..., Any]:
    @functools.wraps(original, updated=())
    def get_replay_topk(self: Any, scores: Any, topk: int, *args: Any, **kwargs: Any) -> Any:
        guard.before(self)
        values, indices = original(self, scores, topk, *args, **kwargs)
        guard.after(self, scores, topk, indices)
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


CLOSED_TOPK = Patch(
    name="verl/megatron_closed_topk",
    peer="verl",
    supports=">=0.9.1,<=0.9.1",
    target="verl.utils.megatron.router_replay_patch:RouterReplay.get_replay_topk",
    make=_guarded_topk,
    probe=_probe,
    observed="the guard refuses a replayed batch in which a router made no selection through it",
    upstream="https://github.com/verl-project/verl/blob/v0.9.1/verl/utils/megatron/router_replay_patch.py",
    reason="A router without routes chooses for itself, and tokens behind the last row of routes reach no expert, both without "
    "an error.",
    not_covered="megatron-core's own RouterReplay, which verl leaves in place where routers take input_ids. Which micro-batch's "
    "routes a recomputation gets: verl's queue hands them out in the order of the forward passes. A pass of an own loss over as "
    "many other tokens as the micro-batch has, which takes its routes.",
    remove_when="verl raises there instead of routing natively.",
)
