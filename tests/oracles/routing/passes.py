"""Forward and backward passes of tiny models, and what is seen of their routing from the experts' side.

Shapes: B batch, S positions, V vocabulary, R = B * S rows, L MoE layers, K experts per token, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from mismatch_ext.adapters.transformers.routing.layout import MoeLayout
from torch import Tensor, nn

from mismatch_ext.routing import RoutingTrace
from tests.oracles.routing.tiny import VOCABULARY


@dataclass(frozen=True)
class Pass:
    """A forward and backward pass: logits `[B, S, V]` and all gradients."""

    logits: Tensor
    gradients: dict[str, Tensor]

    def same(self, other: Pass) -> bool:
        """Tell whether logits and all gradients are bit-identical."""
        return torch.equal(self.logits, other.logits) and equal(self.gradients, other.gradients)


def tokens() -> Tensor:
    """Return the token ids `[2, 12]` that all passes take; 0 to 2 are special."""
    return torch.randint(3, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(5))


def forward(model: nn.Module) -> tuple[Tensor, Tensor]:
    """Return logits (or a backbone's last hidden states) and a loss."""
    ids = tokens()
    # A speech decoder's own embedding is of codec tokens, and its forward takes no ids.
    speech = getattr(model, "codec_embedding", None)
    output = model(**({"input_ids": ids} if speech is None else {"inputs_embeds": speech(ids)}), use_cache=False)
    logits = output.logits if hasattr(output, "logits") else output.last_hidden_state
    # Every position counts, so that every expert that ran gets a gradient.
    targets = (ids % logits.shape[-1]).roll(-1, 1)[..., None]
    return logits, -logits.log_softmax(-1).gather(-1, targets).mean()


def vouched(model: nn.Module) -> Any:
    """Return `others` of `replay_routing` for the passes of `forward`: a speech decoder's have no token ids to prove."""
    return "refuse" if getattr(model, "codec_embedding", None) is None else "replay"


def backward(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Return the gradients of all parameters that have one."""
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def run(model: nn.Module) -> Pass:
    """Run forward and backward."""
    logits, loss = forward(model)
    return Pass(logits.detach(), backward(model, loss))


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Tell whether two sets of gradients are bit-identical."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def another(trace: RoutingTrace) -> RoutingTrace:
    """Return a routing that differs from a trace in every row and layer, by a step that depends on both."""
    ids = trace.experts.long()
    step = 1 + torch.arange(ids.shape[0])[:, None, None] % 3 + torch.arange(ids.shape[1])[None, :, None] % 2
    moved = (ids + step) % trace.num_experts
    return replace(trace, parts=(moved.to(trace.parts[0].dtype),), versions=((0, 0),))


@dataclass
class Seen:
    """What the experts, or where there are none to ask the routers, were called with.

    Args:
        calls: Per layer, the expert ids of each call; None where it was given none.
    """

    calls: dict[int, list[Tensor | None]] = field(default_factory=dict)

    def times(self) -> set[int]:
        """Return how often layers ran; one number when all ran equally often."""
        return {len(calls) for calls in self.calls.values()}

    def ran(self, trace: RoutingTrace, gradients: dict[str, Tensor]) -> bool:
        """Tell whether all calls were with a trace's experts, those of recomputations too.

        Where experts are called without ids, an expert's weights must have a gradient if and only if some token went to it.

        Args:
            trace: The routes.
            gradients: Of the pass that was seen, by parameter name.
        """
        checked = set()
        for layer, calls in self.calls.items():
            for ids in calls:
                if ids is not None:
                    checked.add(layer)
                    if not torch.equal(ids.long(), trace.layer(layer)):
                        return False
        for layer in set(trace.layers) - checked:
            wanted = set(trace.layer(layer).flatten().tolist())
            for name, gradient in gradients.items():
                if f".{layer}." in name and gradient.dim() == 3 and gradient.shape[0] == trace.num_experts:
                    checked.add(layer)
                    if set(gradient.flatten(1).any(1).nonzero().flatten().tolist()) != wanted:
                        return False
        return checked == set(trace.layers)


@contextmanager
def watched(layout: MoeLayout) -> Iterator[Seen]:
    """See what each layer's experts are called with."""
    seen = Seen({layer: [] for layer in layout.layers})

    def look(layer: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            given = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and not x.is_floating_point())
            seen.calls[layer].append(next(given, None))

        return hook

    hooks = [
        (router.experts or router.module).register_forward_pre_hook(look(router.layer), with_kwargs=True)
        for router in layout.routers
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
