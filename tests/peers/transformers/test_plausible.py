"""What recorded routes are held against: the model's own choice, in the pass that replays them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from mismatch_ext.adapters.transformers.routing import record_routing, replay_routing
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from mismatch_ext.errors import RoutingError
from mismatch_ext.routing import RoutingTrace, check_plausible
from tests.peers.conformance.routes import FAULTS

LAYERS, EXPERTS, TOP_K = 6, 16, 4


def native_of(model: Any, ids: Tensor, trace: RoutingTrace | None = None) -> RoutingTrace:
    """Return what a model chooses by itself, in a pass without replay or in one that replays a trace."""
    with torch.no_grad():
        if trace is None:
            with record_routing(model) as recording:
                model(input_ids=ids, use_cache=False)
            return recording.trace
        with replay_routing(model, trace, native=True) as replay:
            model(input_ids=ids, use_cache=False)
        return replay.native


@cache
def engine() -> tuple[Any, Tensor, RoutingTrace, RoutingTrace]:
    """Return a model, tokens, its own routes, and those of an engine that takes another expert in the first layer alone.

    Above, the engine's routes are what the model itself chooses after that: nothing in them is wrong.
    """
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=LAYERS, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
        moe_intermediate_size=32, num_experts=EXPERTS, num_experts_per_tok=TOP_K, intermediate_size=64, decoder_sparse_step=1,
        initializer_range=0.2, norm_topk_prob=True,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "down_proj" in name:
                parameter.mul_(6.0)  # what an expert says then decides where its token goes above
    ids = torch.randint(0, 64, (4, 32))
    own = native_of(model, ids)
    experts = own.experts.to(torch.int64)
    for row in experts[:, 0]:
        free = sorted(set(range(EXPERTS)) - set(row.tolist()))
        row[-1] = free[int(row[0]) % len(free)]
    for layer in range(1, LAYERS):
        experts[:, layer] = native_of(model, ids, traced(own, experts)).experts[:, layer].to(torch.int64)
    return model, ids, own, traced(own, experts)


def traced(like: RoutingTrace, experts: Tensor) -> RoutingTrace:
    """Return a trace of other experts."""
    return replace(like, parts=(experts.to(like.parts[0].dtype),))


def test_numerics_below_do_not_count_again_above() -> None:
    model, ids, own, trace = engine()
    found = check_plausible(trace, native_of(model, ids, trace))
    assert found.tolist() == [0.75] + [1.0] * (LAYERS - 1)
    # Held against a pass without replay, the same routes would be refused: what differs below adds up.
    with pytest.raises(RoutingError, match=r"layer [2-5] .* No other layer fits"):
        check_plausible(trace, own)


@pytest.mark.parametrize("name", FAULTS)
def test_planted_routes_are_refused_in_the_pass_that_replays_them(name: str) -> None:
    model, ids, _, trace = engine()
    plant, message = FAULTS[name]
    planted = traced(trace, plant(trace.experts.to(torch.int64)))
    with pytest.raises(RoutingError, match=message):
        check_plausible(planted, native_of(model, ids, planted))
