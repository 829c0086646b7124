"""verl's replay of routing in its Megatron engine: where the routes of a batch come in, and where a router takes them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from mismatch_ext.patching import Patch

UPSTREAM = "https://github.com/verl-project/verl/blob/v0.9.1/verl/{}"


def replayed_batch(around: Callable[..., AbstractContextManager[None]]) -> Patch:
    """Declare the patch that runs each batch of verl's Megatron engine inside a context.

    The whole model's configuration, the samples with their names and their routes are all known there, once per mini-batch and
    before any of it is reordered, split or sent.

    Args:
        around: Gets what `forward_backward_batch` gets, the engine first, and returns the context.
    """

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original, updated=())
        def forward_backward_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
            with around(self, *args, **kwargs):
                return original(self, *args, **kwargs)

        return forward_backward_batch

    return Patch(
        name="verl/megatron_replayed_batch",
        peer="verl",
        supports=">=0.9.1,<=0.9.1",
        target="verl.workers.engine.megatron.transformer_impl:MegatronEngine.forward_backward_batch",
        make=make,
        upstream=UPSTREAM.format("workers/engine/megatron/transformer_impl.py"),
        reason="Rows that an agent loop filled with zeros are replayed as expert 0, K times; no id is looked at on the way.",
        not_covered="What happens to routes after this: splitting into micro-batches and packing are verl's own. Rows of "
        "padding, which under R2 verl sends to expert 0. With one expert per token, rows of zeros are routes.",
        remove_when="verl checks the ids of routed_experts before its Megatron engine replays them.",
    )


def closed_topk(before: Callable[[Any], None], after: Callable[[Any, Any, int, Any], None]) -> Patch:
    """Declare the patch that looks at every selection of experts by verl's RouterReplay, before and after.

    Args:
        before: Gets the RouterReplay, and raises where it would fall back on the router's own choice.
        after: Gets the RouterReplay, scores `[T, E]`, K, and the ids that were selected `[T, K]`.
    """

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original, updated=())
        def get_replay_topk(self: Any, scores: Any, topk: int, *args: Any, **kwargs: Any) -> Any:
            before(self)
            values, indices = original(self, scores, topk, *args, **kwargs)
            after(self, scores, topk, indices)
            return values, indices

        return get_replay_topk

    return Patch(
        name="verl/megatron_closed_topk",
        peer="verl",
        supports=">=0.9.1,<=0.9.1",
        target="verl.utils.megatron.router_replay_patch:RouterReplay.get_replay_topk",
        make=make,
        upstream=UPSTREAM.format("utils/megatron/router_replay_patch.py"),
        reason="A router without routes chooses for itself, and one with too few rows drops the tokens behind them, without an "
        "error.",
        not_covered="megatron-core's own RouterReplay, which versions of it use whose routers take input_ids. Which "
        "micro-batch's routes a recomputation gets: verl's queue hands them out in the order of the forward passes.",
        remove_when="verl raises there instead of routing natively.",
    )
