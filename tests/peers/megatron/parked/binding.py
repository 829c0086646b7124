"""Puts a session between decoder blocks and their routers, and keeps it there when activations are recomputed.

Only attributes of the model's own objects are shadowed, for the time of a context. Recomputation happens later, in a backward
pass of which nobody says to what micro-batch it belongs; but what is run again is a closure, made in the forward pass. The
methods that make such closures (`TransformerBlock._checkpointed_forward`, `MoELayer.forward`) are given a stand-in for their
`self`, which remembers the session; torch's own checkpoint has its function wrapped. So a trace is bound when the forward runs,
lives as long as the graph does, and there is neither a queue nor anything to clear.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from megatron.core.tensor_parallel.random import CheckpointFunction
from mismatch_ext.patches.torch.checkpoint import checkpoints_bound
from torch import Tensor, nn

from mismatch_ext.errors import ReplayError
from mismatch_ext.routing.tokens import TokenRows
from tests.peers.megatron.parked.layout import Chunk
from tests.peers.megatron.parked.tokens import pass_tokens

Call = Callable[..., Any]


@dataclass(eq=False)
class Forward:
    """One pass through one decoder block.

    Args:
        chunk: The block's chunk.
        gradients: Whether gradients were on when it began.
        tokens: What it is over, or why that is not known; None where an earlier pipeline stage knows.
        again: Whether it runs again, in a backward pass.
        batch: Micro-batch size, as the routers see it.
        hits: Times that each MoE layer's router ran.
        seen: What the session keeps per layer.
    """

    chunk: Chunk
    gradients: bool
    tokens: TokenRows | str | None = None
    again: bool = False
    batch: int = 0
    hits: dict[int, int] = field(default_factory=dict)
    seen: dict[int, Tensor] = field(default_factory=dict)


class Session(Protocol):
    """What is done at a router."""

    replays: bool

    def takes(self, forward: Forward) -> bool:
        """Tell, as a pass begins, whether it is this session's; the model runs another one as if there were no session."""

    def select(
        self, chunk: Chunk, layer: int, forward: Forward | None, shape: torch.Size, scores: Tensor, plain: Call
    ) -> Any:
        """Return the values and indices of the top-k; `forward` is None in a recomputation, `shape` is `[C, B, E]`."""

    def finish(self, forward: Forward) -> None:
        """Take note of a complete pass."""


def in_backward() -> bool:
    """Tell whether this thread is running a backward pass: a forward in it is a recomputation."""
    return torch._C._current_graph_task_id() != -1  # torch.utils.checkpoint itself asks in this way


class Binding:
    """Shadows the forward of decoder blocks and the routing of their routers.

    Args:
        chunks: Where the routers are.
        session: What to do at them.

    Raises:
        ReplayError: Another session is bound to the model, or somebody else shadows the same methods.
    """

    def __init__(self, chunks: tuple[Chunk, ...], session: Session) -> None:
        self._session = session
        self._forward_now: Forward | None = None
        self._others = False  # whether a pass runs that is not the session's
        self._called: tuple[tuple[Any, ...], dict[str, Any]] | None = None  # arguments of the model around the decoder
        self._checkpoints = 0  # depth of functions that run, or run again, bound to this session
        self._shadows: list[tuple[nn.Module, str, _Shadow]] = []
        for chunk in chunks:
            self._shadow(chunk.model, "forward", partial(self._run_model, chunk.model.forward))
            self._shadow(chunk.block, "forward", partial(self._run_block, chunk, chunk.block.forward))
            for layer, moe in chunk.moe.items():
                routing = partial(self._run_router, chunk, layer, moe.router, moe.router.routing)
                self._shadow(moe.router, "routing", routing)
                if session.replays and moe.moe_layer_recompute:
                    self._shadow(moe, "forward", partial(self._run_moe, moe), own=True)
            if session.replays:
                self._shadow(chunk.block, "_checkpointed_forward", partial(self._run_layers, chunk.block), own=True)

    def _shadow(self, module: nn.Module, name: str, call: Call, own: bool = False) -> None:
        before = vars(module).get(name)
        if isinstance(before, _Shadow):
            raise ReplayError(
                "routing of this model is already being recorded or replayed; leave that context first (to see the model's own "
                "routing during replay, use replay_routing(..., native=True))."
            )
        if own and before is not None:
            raise ReplayError(
                f"{type(module).__name__}.{name} is shadowed on the object by {before!r}; recomputation could not be bound."
            )
        self._shadows.append((module, name, _Shadow(call)))

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Shadow the methods, and restore what was there before."""
        with ExitStack() as stack:
            for module, name, shadow in self._shadows:
                attributes = vars(module)
                stack.callback(_restore, attributes, name, attributes.get(name, _ABSENT))
                attributes[name] = shadow
            if self._session.replays:
                stack.enter_context(checkpoints_bound(_Binder(self)))
            yield

    def bound(self, function: Call) -> Call:
        """Return a function that, run again in a backward pass, finds this session at the routers."""
        if self._others:
            return function

        def run(*args: Any, **kwargs: Any) -> Any:
            with ExitStack() as stack:
                if in_backward():
                    stack.enter_context(self.installed())
                stack.callback(setattr, self, "_checkpoints", self._checkpoints)
                self._checkpoints += 1
                return function(*args, **kwargs)

        return run

    def _unrelated(self) -> bool:
        """Tell whether this is another pass, or the recomputation of a forward that ran outside this session."""
        return self._others or (in_backward() and not self._checkpoints)

    def _run_model(self, plain: Call, *args: Any, **kwargs: Any) -> Any:
        before, self._called = self._called, (args, kwargs)
        try:
            return plain(*args, **kwargs)
        finally:
            self._called = before

    def _run_block(self, chunk: Chunk, plain: Call, *args: Any, **kwargs: Any) -> Any:
        if self._unrelated():
            return plain(*args, **kwargs)
        if self._session.replays and not self._checkpoints and _inside(CheckpointFunction.forward):
            raise ReplayError(_UNBOUND.format("the decoder block"))
        called = "the decoder was called by itself, without its model"
        tokens = called if self._called is None else pass_tokens(chunk.model, *self._called)
        forward = Forward(chunk=chunk, gradients=torch.is_grad_enabled(), tokens=tokens, again=in_backward())
        if not self._session.takes(forward):
            # Nothing is bound in it, so that what is recomputed of it is not the session's either.
            self._others = True
            try:
                return plain(*args, **kwargs)
            finally:
                self._others = False
        outer, self._forward_now = self._forward_now, forward
        try:
            output = plain(*args, **kwargs)
        finally:
            self._forward_now = outer
        missed = {layer: forward.hits.get(layer, 0) for layer in chunk.moe if forward.hits.get(layer, 0) != 1}
        if missed:
            raise ReplayError(
                f"one forward of the decoder ran the routers of layers {sorted(missed)} {list(missed.values())} times; each "
                "must run exactly once, or routes are not what was asked for. Was a layer skipped, repeated or replaced?"
            )
        if not in_backward():
            self._session.finish(forward)
        return output

    def _run_router(
        self, chunk: Chunk, layer: int, router: Any, plain: Call, logits: Tensor, padding_mask: Tensor | None = None
    ) -> Any:
        if self._unrelated():
            return plain(logits, padding_mask=padding_mask)
        forward = self._forward_now
        if forward is None and not in_backward():
            raise ReplayError(f"the router of decoder layer {layer} ran outside a forward of its decoder block.")
        if forward is not None:
            if self._session.replays and forward.gradients and not torch.is_grad_enabled() and not self._checkpoints:
                raise ReplayError(_UNBOUND.format(f"decoder layer {layer}"))
            forward.hits[layer] = forward.hits.get(layer, 0) + 1
            forward.batch = logits.shape[1]
        seam = _Seam(partial(self._session.select, chunk, layer, forward, logits.shape))
        before, router.router_replay = router.router_replay, seam
        try:
            result = plain(logits, padding_mask=padding_mask)
        finally:
            router.router_replay = before
        if seam.calls != 1:
            raise ReplayError(
                f"the router of decoder layer {layer} asked for its experts {seam.calls} times, not once; its selection "
                "bypasses megatron-core's top-k."
            )
        return result

    def _run_layers(self, block: Any, *args: Any, **kwargs: Any) -> Any:
        if self._others:  # it asks for its layers when it runs again
            return type(block)._checkpointed_forward(block, *args, **kwargs)

        def get_layer(index: int) -> Any:
            layer = block._get_layer(index)
            return _StandIn(layer, {}, self.bound(layer))

        return type(block)._checkpointed_forward(_StandIn(block, {"_get_layer": get_layer}), *args, **kwargs)

    def _run_moe(self, moe: Any, *args: Any, **kwargs: Any) -> Any:
        return type(moe).forward(_StandIn(moe, {"route": self.bound(moe.route)}), *args, **kwargs)


_ABSENT = object()
_UNBOUND = (
    "{} runs inside a checkpoint that is neither the model's own (recompute_granularity) nor torch.utils.checkpoint; its "
    "recomputation in the backward pass could not be given the same routes. Use recompute_granularity."
)


def _restore(attributes: dict[str, Any], name: str, before: Any) -> None:
    if before is _ABSENT:
        attributes.pop(name, None)
    else:
        attributes[name] = before


class _Shadow:
    """A method of one object; known by its type."""

    def __init__(self, call: Call) -> None:
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)


class _StandIn:
    """A module with some of its methods replaced, for closures that keep their `self`."""

    def __init__(self, module: nn.Module, replaced: dict[str, Call], call: Call | None = None) -> None:
        vars(self).update(_module=module, _call=call or module, **replaced)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return vars(self)["_call"](*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_module"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_module"], name, value)


class _Seam:
    """Stands where megatron-core asks a RouterReplay for the top-k, of scores that no group limit has masked yet."""

    def __init__(self, select: Call) -> None:
        self._select = select
        self.calls = 0

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, default_compute_topk: Call
    ) -> Any:
        """Answer megatron-core's `compute_topk`."""
        self.calls += 1
        return self._select(scores, partial(default_compute_topk, scores, topk, num_groups, group_topk))


def _inside(function: Call) -> bool:
    """Tell whether a function is running further up this thread's stack."""
    code = function.__code__
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


@dataclass(frozen=True)
class _Binder:
    """Binds what torch's checkpoints run again; a function that has nothing to do with the model is bound without effect."""

    binding: Binding

    def bound(self, function: Call) -> Call:
        return self.binding.bound(function)

    def checkpointing(self) -> AbstractContextManager[None]:
        return nullcontext()
