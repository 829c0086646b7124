"""Models of every family, with routes of their own and what a pass with these gives."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.utils.checkpoint
from mismatch_ext.adapters.transformers.routing import record_routing, replay_routing
from torch import Tensor, nn

from mismatch_ext.routing import RoutingTrace
from tests.oracles.routing.passes import (
    Pass,
    forward,
    run,
    vouched,
)
from tests.oracles.routing.tiny import families

# They take images, and no tokens whose routes an engine could report.
OF_IMAGES = {"dots3_note_vision_encoder"}
FAMILIES = {family.name: family for family in families() if family.name not in OF_IMAGES}
# All others must be replayable: a family that a new transformers brings is looked at when it is not.
REFUSED = {
    "deepseek_v2 (topk_method=group_limited_greedy)": "topk_method='group_limited_greedy'",
    "deepseek_v4": "DeepseekV4HashRouter selects in another way (tid2eid)",
    "doge": "product keys",
    "ernie4_5_vl_moe_text": "several routers (layers.1.mlp.text_moe and layers.1.mlp.vision_moe)",
    "jetmoe": "several routers",
    "nllb-moe": "NllbMoeTop2Router selects in another way",
    "phimoe": "PhimoeTopKRouter selects in another way (sparsemixer)",
    "switch_transformers": "SwitchTransformersTop1Router selects in another way (argmax, max)",
    "vitpose_backbone": "the block is told which to run",
    # It chooses among its experts and one that computes nothing.
    "zaya": "asked 0 times for the top 1 of 12 scores",
}
# Modes of gradient checkpointing in which the family may fail, or compute other bits, without replay too.
WITHOUT = {
    "diffusion_gemma_text": frozenset({"reentrant", "non-reentrant"}),
    # On some CPUs the gradients of its embeddings are added in another order, and differ in their last bits.
    "inkling2_loop_text": frozenset({"reentrant"}),
    "inkling2_text": frozenset({"reentrant"}),
    "mistral_large4_text": frozenset({"reentrant"}),
}
QWEN = "qwen3_moe (norm_topk_prob, dense layer)"  # layers 0, 2 and 3 of 4 have experts
REENTRANT = [True, False]


@cache
def case(name: str, dtype: torch.dtype = torch.float32, experts: str = "eager") -> tuple[Any, RoutingTrace, Pass]:
    """Return a model that no test changes, its own routing and a plain pass."""
    model = FAMILIES[name].build(dtype, experts=experts)
    with torch.no_grad(), record_routing(model) as recording:
        forward(model)
    return model, recording.trace, run(model)


def replayed(model: nn.Module, trace: RoutingTrace, mask: Tensor | None = None) -> Pass:
    """Run forward and backward with a routing."""
    with replay_routing(model, trace, mask, others=vouched(model)):
        return run(model)


def of(experts: Tensor, like: RoutingTrace) -> RoutingTrace:
    """Return a trace of other experts."""
    return replace(like, parts=(experts.to(like.parts[0].dtype),))
