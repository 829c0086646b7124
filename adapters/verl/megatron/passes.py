"""Which forward passes of verl's Megatron engine are those of its micro-batches: only these may be replayed or recorded.

verl puts a micro-batch's routes at the routers, and the next pass takes them, even if a user's loss runs the model over other
tokens, or such a pass is recomputed. Here every pass through the model is compared with the micro-batch, and a pass over other
tokens finds the routers without replay.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from verl.utils.megatron.router_replay_utils import iter_model_routers
from verl.utils.megatron_utils import unwrap_model

from mismatch_ext.errors import ReplayError


class PassGuard:
    """Tells the passes of a batch apart.

    Attributes:
        others: Passes over other tokens than the micro-batch's, which the model routed itself.
        foreign: Whether such a pass runs.
    """

    def __init__(self) -> None:
        self.others = 0
        self.foreign = False
        self._expected: list[Tensor] | None = None  # token ids of the micro-batch whose forward step runs
        self._own = 0  # its passes in that step

    @contextmanager
    def batch(self, engine: Any) -> Iterator[None]:
        """Watch the passes of a batch. With context parallelism a rank sees a part of the tokens, and nothing is compared."""
        if engine.engine_config.context_parallel_size > 1:
            yield
            return
        with ExitStack() as stack:
            chunks = [unwrap_model(chunk) for chunk in engine.module]
            plain, before = engine.forward_step, vars(engine).get("forward_step")

            def forward_step(batch_iter: Any, *args: Any, **kwargs: Any) -> Any:
                micro_batch = next(batch_iter)
                self._expected = [ids.detach() for ids in micro_batch["input_ids"].unbind()]
                self._own = 0
                try:
                    result = plain(iter([micro_batch]), *args, **kwargs)
                finally:
                    self._expected = None
                if not self._own:
                    raise ReplayError(
                        "a forward step of verl's Megatron engine ran no pass over its micro-batch's tokens, so nothing was "
                        "replayed: something changes them on their way to the model."
                    )
                return result

            engine.forward_step = forward_step
            stack.callback(_restore, engine, before)
            for chunk in chunks:
                handles = (
                    chunk.register_forward_pre_hook(self._begin, with_kwargs=True),
                    chunk.register_forward_hook(self._end, always_call=True),
                )
                for handle in handles:
                    stack.callback(handle.remove)
            yield

    def _begin(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._expected is not None and _is_over(model, args, kwargs, self._expected):
            self._own += 1
            return
        if torch.is_grad_enabled() and getattr(model.config, "recompute_granularity", None):
            raise ReplayError(
                "a forward pass with gradients is over other tokens than the micro-batch's, and recompute_granularity="
                f"{model.config.recompute_granularity!r}: recomputed in the backward pass it would take the micro-batch's "
                "routes. Run it under torch.no_grad(), or switch recomputation off."
            )
        self.others += 1
        self.foreign = True
        self._actions = [(router, router.router_replay_action) for _, router in iter_model_routers([model])]
        for router, _ in self._actions:
            router.router_replay_action = None

    def _end(self, model: Any, args: Any, output: Any) -> None:
        if self.foreign:
            self.foreign = False
            for router, action in self._actions:
                router.router_replay_action = action


def _is_over(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], expected: list[Tensor]) -> bool:
    """Tell whether a pass is over a micro-batch's samples, in their order, each perhaps with padding behind it."""
    given = dict(zip(inspect.signature(type(model).forward).parameters, (model, *args), strict=False)) | kwargs
    ids, packed = given.get("input_ids"), given.get("packed_seq_params")
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        return not getattr(model, "pre_process", True)  # a later stage's tokens are those of the first
    width = ids.shape[1]
    places = [row * width for row in range(len(ids))] if packed is None else packed.cu_seqlens_q.tolist()[:-1]
    ends = [*places[1:], ids.numel()]
    if len(places) != len(expected):
        return False
    if any(end - place < len(own) for place, end, own in zip(places, ends, expected, strict=True)):
        return False
    flat = ids.flatten()
    found = [flat[place : place + len(own)] for place, own in zip(places, expected, strict=True)]
    return torch.equal(torch.cat(found), torch.cat(expected).to(flat))


def _restore(engine: Any, before: Any) -> None:
    if before is None:
        del engine.forward_step
    else:
        engine.forward_step = before
