"""Routing record and replay in the real transformers: every family, by its own formula."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
import transformers
from mismatch_ext.adapters.transformers import routing
from mismatch_ext.adapters.transformers.routing import moe_layout, record_routing, replay_routing
from mismatch_ext.adapters.transformers.routing.layout import sizes_of_config
from torch import nn
from transformers import AutoConfig

from mismatch_ext.config import RoutingConfig
from mismatch_ext.errors import ReplayError
from mismatch_ext.routing.replay import RouteReplay
from tests.oracles.routing.passes import (
    another,
    forward,
    run,
)
from tests.oracles.routing.proof import prove
from tests.peers.transformers.cases import FAMILIES, QWEN, REFUSED, WITHOUT, case

# The slowest family takes two minutes.
SLOW = ("dots3_note_text",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] if name in SLOW else []) for name in FAMILIES]
)
def test_family(name: str) -> None:
    if name not in REFUSED:
        prove(FAMILIES[name], WITHOUT.get(name, frozenset()))
        return
    model = FAMILIES[name].build()
    with pytest.raises(ReplayError) as refused:
        moe_layout(model)
        with record_routing(model):
            run(model)
    assert REFUSED[name] in str(refused.value) and str(refused.value).startswith(name.split(" ")[0])


def test_no_family_with_experts_and_a_top_k_is_overlooked() -> None:
    models = Path(transformers.__file__).parent / "models"
    seen = {family.config.__module__.split(".")[2] for family in FAMILIES.values()}
    texts = {path.parent.name: path.read_text(encoding="utf-8") for path in models.glob("*/modeling_*.py")}
    assert seen >= {name for name, text in texts.items() if "topk(" in text and "experts" in text}


# Gate weights, from the formulas of the papers and not from the models' code.


@pytest.mark.numeric
@pytest.mark.numeric
@pytest.mark.parametrize(
    "name", ["mixtral", "olmoe", "deepseek_v3"], ids=["softmax of chosen", "softmax of all", "sigmoid, renormalized"]
)
def test_gate_weights_of_replayed_experts_follow_the_formula(name: str) -> None:
    model, own, _ = case(name)
    trace, seen = another(own), {}
    layer = own.layers[0]
    block = model.get_submodule(moe_layout(model).routers[0].name)
    hooks = [
        block.register_forward_pre_hook(lambda module, args: seen.update(hidden=args[0].reshape(-1, 32))),
        block.experts.register_forward_pre_hook(lambda module, args: seen.update(ids=args[1], weights=args[2])),
    ]
    with torch.no_grad(), replay_routing(model, trace):
        forward(model)
    for hook in hooks:
        hook.remove()
    chosen = trace.layer(layer)
    assert torch.equal(seen["ids"], chosen)
    logits = seen["hidden"].double() @ block.gate.weight.double().T
    if name == "mixtral":  # softmax over the chosen, as in arXiv 2510.11370: renormalizing cancels the rest of the sum
        expected = logits.gather(1, chosen).softmax(-1)
    elif name == "olmoe":  # norm_topk_prob is off: the chosen do not sum to 1
        expected = logits.softmax(-1).gather(1, chosen)
    else:  # the selection bias and the groups do not weigh
        score = logits.sigmoid().gather(1, chosen)
        expected = score / score.sum(-1, keepdim=True) * model.config.routed_scaling_factor
    torch.testing.assert_close(seen["weights"].double(), expected, rtol=1e-5, atol=1e-7)


# Layout.


def test_layers_are_absolute_and_dense_ones_have_no_router() -> None:
    layout = moe_layout(case(QWEN)[0])
    assert (layout.layers, layout.num_experts, layout.top_k) == ((0, 2, 3), 12, 2)
    assert layout.family == "qwen3_moe" and layout.decoder is case(QWEN)[0].model


def test_what_an_indexer_selects_is_named() -> None:
    """Keys that a token attends to are chosen by a top-k, too, and are no experts."""
    model = case("glm_moe_dsa (index_topk=4)")[0]
    with pytest.warns(
        UserWarning, match=r"4 modules beside .*layers\.0\.self_attn\.indexer \(GlmMoeDsaIndexer, 4 at most\)"
    ):
        RouteReplay(RoutingConfig(mode="R3"), routing, model, seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RouteReplay(RoutingConfig(mode="R3"), routing, case(QWEN)[0], seed=0)


def test_a_dense_model_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ReplayError, match="Sequential: no module of the model has experts"):
        moe_layout(model)


@pytest.mark.parametrize(
    ("family", "settings", "sizes"),
    [
        ("qwen3_moe", {"num_experts": 16, "num_experts_per_tok": 3}, (16, 3)),
        ("aria_text", {"moe_num_experts": 16, "moe_topk": 3}, (16, 3)),
        ("longcat_flash", {"n_routed_experts": 16, "moe_topk": 3}, (16, 3)),
        ("gemma4_text", {"num_experts": 16, "top_k_experts": 3}, (16, 3)),
        ("dbrx", {"ffn_config": {"moe_num_experts": 16, "moe_top_k": 3}}, (16, 3)),
    ],
)
def test_a_config_states_its_experts_under_its_familys_names(
    family: str, settings: Any, sizes: tuple[int, int]
) -> None:
    assert sizes_of_config(AutoConfig.for_model(family, **settings)) == sizes
