"""Put a session between a model's routers and their top-k while a context is open.

The session of the running thread decides what happens at a router. A recomputation sets the session of its own forward pass
again (see `checkpointing`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from mismatch_ext.adapters.transformers.routing.checkpointing import checkpoint_functions, in_backward, runs_unbound
from mismatch_ext.adapters.transformers.routing.layout import MoeLayout, Router, moe_layout
from mismatch_ext.adapters.transformers.routing.session import Forward, Session
from mismatch_ext.adapters.transformers.routing.shadow import Around, Handed, Instead, shadow, uncompiled
from mismatch_ext.adapters.transformers.routing.tokens import pass_tokens
from mismatch_ext.adapters.transformers.routing.topk import AnsweredTopK
from torch import Tensor, nn

from mismatch_ext.errors import ReplayError
from mismatch_ext.routing.tokens import TokenRows

Call = Callable[..., Any]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class _Running(threading.local):
    """What this thread is doing; each thread has its own, because autograd recomputes in threads of its own."""

    session: Session | None = None
    forward: Forward | None = None
    bound: bool = False  # whether it is in a checkpointed function that knows its session
    called: Arguments | None = None  # arguments of the module that embeds tokens for the decoder


class Binding:
    """Replaces the forward of the decoder, its routers and its experts; all contexts of a model share one binding.

    Args:
        layout: Where these modules are.
    """

    def __init__(self, layout: MoeLayout) -> None:
        self.layout = layout
        self._running = _Running()
        self._lock = threading.Lock()
        self._users = 0
        self._checkpointed: list[tuple[Any, str]] = []  # found anew by each context, not by each recomputation
        self._undo = ExitStack()

    @classmethod
    def of(cls, model: nn.Module) -> Binding:
        """Return the model's binding; it is the same one as long as a context or a graph still needs it.

        Args:
            model: The model, possibly wrapped.

        Raises:
            ReplayError: The model's routing cannot be recorded or replayed.
        """
        layout = moe_layout(model)
        with _BINDINGS_LOCK:
            binding = _BINDINGS.get(id(layout.decoder))
            if binding is None or binding.layout.places() != layout.places():
                binding = _BINDINGS[id(layout.decoder)] = cls(layout)
            return binding

    @contextmanager
    def active(self, session: Session) -> Iterator[None]:
        """Put a session at the routers, in this thread.

        Args:
            session: Decides what happens there.

        Raises:
            ReplayError: Another session is there.
        """
        running = self._running
        if running.session is not None:
            raise ReplayError(
                f"{self.layout.family}: routing of this model is already being recorded or replayed; leave that context first "
                "(to see the model's own routing during replay, use replay_routing(..., native=True))."
            )
        self._checkpointed = list(checkpoint_functions(self.layout.decoder))
        with self._installed():
            running.session = session
            try:
                yield
            finally:
                running.session = None

    @contextmanager
    def _resumed(self, session: Session) -> Iterator[None]:
        """Put a session at the routers for a function that a checkpoint runs, for the first time or again."""
        running = self._running
        with self._installed():
            before = running.session, running.forward, running.bound
            # A layer that runs again in a backward pass does not belong to a forward pass that may be under way.
            running.session, running.forward, running.bound = session, None if in_backward() else running.forward, True
            try:
                yield
            finally:
                running.session, running.forward, running.bound = before

    def _bound(self, function: Call) -> Call:
        """Return a checkpointed function that sets the present session whenever it runs; itself if nothing is replayed."""
        session = self._session()
        if session is None or not session.replays:
            return function

        def resumed() -> ExitStack:
            stack = ExitStack()
            stack.enter_context(self._resumed(session))
            return stack

        enter, leave = uncompiled(resumed), uncompiled(ExitStack.close)

        def run(*args: Any, **kwargs: Any) -> Any:
            stack = enter()
            try:
                return function(*args, **kwargs)
            finally:
                leave(stack)

        return uncompiled(run, inside=True)

    @contextmanager
    def _installed(self) -> Iterator[None]:
        """Replace the methods until the last user leaves and restores what was there before."""
        with self._lock:
            if not self._users:
                with ExitStack() as stack:
                    self._install(stack)
                    self._undo = stack.pop_all()
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._undo.close()

    def _install(self, stack: ExitStack) -> None:
        layout = self.layout
        shadow(stack, layout.decoder, "forward", Around(enter=self._begin, leave=self._end))
        if layout.caller is not None:
            shadow(stack, layout.caller, "forward", Around(enter=self._call, leave=self._return))
        for router in layout.routers:
            shadow(stack, router.module, router.method, Instead(call=partial(self._run_router, router)))
        for experts, layer in {r.experts: r.layer for r in layout.routers if r.experts is not None}.items():
            around = Around(enter=partial(self._check_experts, layer), leave=lambda state, returned: None)
            shadow(stack, experts, "forward", around)
        for owner, name in self._checkpointed:
            shadow(stack, owner, name, Handed(change=self._bound))

    def _session(self) -> Session | None:
        """Return the session, or None if the model has to behave as if there were none."""
        session = self._running.session
        # A recomputation without a bound session belongs to a forward pass that ran before this context.
        return None if session is None or (not self._running.bound and in_backward()) else session

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        before, self._running.called = self._running.called, (args, kwargs)
        return before

    def _return(self, before: Arguments | None, returned: bool) -> None:
        self._running.called = before

    def _tokens(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TokenRows | str:
        called = self._running.called
        tokens = pass_tokens(self.layout.decoder, args, kwargs)
        if isinstance(tokens, TokenRows) or self.layout.caller is None or called is None:
            return tokens
        return pass_tokens(self.layout.caller, *called)

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Session, Forward, bool] | None:
        session, running = self._session(), self._running
        if session is None:
            return None
        forward = Forward(
            arguments=(args, kwargs),
            tokens=self._tokens(args, kwargs),
            gradients=torch.is_grad_enabled(),
            recomputed=running.bound and in_backward(),
            outer=running.forward,
        )
        taken = session.takes(forward)
        if taken and session.replays:
            given = () if self.layout.caller is not None else (*args, *kwargs.values())
            self._expect_bound("the model", any(isinstance(x, Tensor) and x.requires_grad for x in given))
        # If the session does not take a pass, its checkpoints stay unbound, so that their recomputation has no session either.
        running.session, running.forward = (session, forward) if taken else (None, None)
        return session, forward, taken

    def _end(self, begun: tuple[Session, Forward, bool] | None, returned: bool) -> None:
        if begun is None:
            return
        session, forward, taken = begun
        self._running.session, self._running.forward = session, forward.outer
        if not (returned and taken):
            return
        if any(forward.hits.get(layer, 0) != 1 for layer in self.layout.layers) or forward.chosen:
            raise ReplayError(self._wrong_hits(forward))
        if not forward.recomputed:
            session.finish(forward)

    def _wrong_hits(self, forward: Forward) -> str:
        family = self.layout.family
        wrong = {layer: n for layer in self.layout.layers if (n := forward.hits.get(layer, 0)) != 1}
        if wrong:
            missed, again = [n for n, hits in wrong.items() if not hits], [n for n, hits in wrong.items() if hits]
            parts = [f"not that of layers {missed}"] if missed else []
            parts += [f"several times that of layers {again}"] if again else []
            return (
                f"{family}: one forward pass ran {' and '.join(parts)}; every MoE layer's router must run exactly once, or "
                "routes are not what was asked for. Is a layer skipped, repeated or replaced, or its block run by a fused or "
                "hub kernel that bypasses the router?"
            )
        return (
            f"{family}: in layers {sorted(forward.chosen)} the router ran but its experts did not; something else computes "
            "the layer (a fused or hub kernel?), and whether it keeps to the routes is not known."
        )

    def _run_router(self, router: Router, plain: Call, *args: Any, **kwargs: Any) -> Any:
        session, forward = self._session(), self._running.forward
        if session is None:
            return plain(*args, **kwargs)
        layer, layout = router.layer, self.layout
        if forward is None and not self._running.bound:
            raise ReplayError(f"{layout.family}: the router of layer {layer} ran outside a forward of the decoder.")
        if session.replays and forward:
            self._expect_bound(f"layer {layer}", forward.gradients)
        answer = AnsweredTopK(
            layout.num_experts,
            layout.top_k,
            partial(session.select, layer, forward),
            # transformers 5.17 renamed n_group to num_group.
            one_group=1 in (getattr(router.module, name, None) for name in ("n_group", "num_group")),
        )
        with answer:
            output = plain(*args, **kwargs)
        if answer.chosen is None or answer.calls != 1:
            raise ReplayError(
                f"{layout.family}: the router of layer {layer} ({type(router.module).__name__}.{router.method}) asked "
                f"{answer.calls} times for the top {layout.top_k} of {layout.num_experts} scores, not once; its choice of "
                f"experts cannot be replayed. Top-k calls seen: {answer.others or 'none'}."
            )
        if forward is not None:
            forward.hits[layer] = forward.hits.get(layer, 0) + 1
            if router.experts is not None:
                forward.chosen[layer] = answer.chosen
        return output

    def _expect_bound(self, place: str, gradients: bool) -> None:
        if not self._running.bound and runs_unbound(gradients):
            raise ReplayError(
                f"{self.layout.family}: {place} runs in a checkpoint that replay does not reach, or without gradients in a pass "
                "with them, and its recomputation would choose other experts. Call the model's gradient_checkpointing_enable() "
                "before the replay begins, or use FSDP's activation checkpointing."
            )

    def _check_experts(self, layer: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        forward = self._running.forward
        chosen = forward.chosen.pop(layer, None) if forward and self._session() else None
        if chosen is None:
            return
        for given in (*args, *kwargs.values()):
            if not isinstance(given, Tensor) or given.shape != chosen.shape or given.is_floating_point():
                continue
            # It is nearly always the very same memory, and comparing the values would wait for the device.
            if given.data_ptr() != chosen.data_ptr() and not torch.equal(given.to(chosen.dtype), chosen):
                raise ReplayError(
                    f"{self.layout.family}: the experts of layer {layer} were given others than the router chose; code "
                    "between the two overrides the routes (an expert-parallel plan?)."
                )


_BINDINGS: WeakValueDictionary[int, Binding] = WeakValueDictionary()
_BINDINGS_LOCK = threading.Lock()
