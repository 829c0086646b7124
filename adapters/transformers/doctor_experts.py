"""Causes in models with experts: how an engine weighs the chosen experts, and how many it chooses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from mismatch_ext.adapters.transformers.doctor import Scorer, scored_under
from mismatch_ext.adapters.transformers.doctor_changes import attributes
from mismatch_ext.adapters.transformers.routing import moe_layout
from torch import Tensor, nn

from mismatch_ext.doctor import Cause

FACTORS = (0.5, 0.8, 0.95, 1.05, 1.25, 2.0)
NORMALISED = "norm_topk_prob"


def of_experts(scorer: Scorer, counts: Sequence[int] = ()) -> list[Cause]:
    """Return the causes that concern experts; none for a model without experts.

    Args:
        scorer: The scorer of the sample.
        counts: Numbers of experts per token to try, besides those near the trainer's.
    """
    if scorer.shape is None:
        return []
    layout = moe_layout(scorer.model)
    flags = [(r.module, NORMALISED) for r in layout.routers if hasattr(r.module, NORMALISED)]
    chosen = {r.layer: r.experts for r in layout.routers if r.experts is not None}

    found = []
    if chosen:
        found.append(
            scored_under(scorer, lambda x: _scaled(list(chosen.values()), x), key="expert_scale", family="config",
                         remedy="model",
                         said="the engine's experts weigh {x} times the trainer's", grid=FACTORS, neutral=1.0, steps=6)
        )  # fmt: skip
    if flags:
        said = "does not normalise" if getattr(*flags[0]) else "normalises"
        found.append(
            scored_under(scorer, lambda _: attributes(flags, lambda before: not before), key="expert_norm", family="config",
                         remedy="model",
                         said=f"the engine {said} the weights of the chosen experts, other than the trainer")
        )  # fmt: skip
    # If the engine recorded its routes, it has as many experts per token as the trainer; otherwise they were refused.
    if scorer.sample.routes is None and all(hasattr(r.module, "top_k") for r in layout.routers):
        near = [k for k in (*counts, 1, layout.top_k // 2, layout.top_k - 1, layout.top_k + 1, layout.top_k * 2)
                if 0 < k <= layout.num_experts and k != layout.top_k]  # fmt: skip
        chooses = [(r.module, "top_k") for r in layout.routers]
        found.append(
            scored_under(scorer, lambda x: attributes(chooses, lambda _: int(x)), key="experts_per_token", family="config",
                         remedy="model",
                         said="the engine chooses {x} experts for each token", grid=tuple(map(float, dict.fromkeys(near))))
        )  # fmt: skip
    return found


@contextmanager
def _scaled(modules: list[nn.Module], factor: float) -> Iterator[None]:
    def scale(_: nn.Module, given: Any, output: Tensor) -> Tensor:
        return output * factor

    with ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_hook(scale).remove)
        yield
