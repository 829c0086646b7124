"""Contexts that record and replay in the real transformers: what they refuse, leave behind and route by themselves."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from types import MethodType
from typing import Any

import pytest
import torch
from mismatch_ext.adapters.transformers.routing import moe_layout, record_routing, replay_routing
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from mismatch_ext.errors import ReplayError, RoutingError
from mismatch_ext.routing import RoutingTrace
from tests.oracles.routing.passes import (
    another,
    backward,
    forward,
    run,
)
from tests.peers.transformers.cases import FAMILIES, QWEN, REENTRANT, case, of, replayed
from tests.traces import same

# What must not pass unnoticed.


def bypass(model: Any, layer: int, forward: Callable[..., Any]) -> nn.Module:
    """Give a layer's block another forward, as a hub kernel does."""
    block = model.model.layers[layer].mlp
    block.forward = MethodType(forward, block)
    return block


@pytest.mark.parametrize("context", ["replay", "record"])
@pytest.mark.parametrize(
    "forward_of_block, message",
    [
        (lambda self, hidden: hidden, r"ran not that of layers \[2\]"),
        (
            lambda self, hidden: type(self).forward(self, hidden) + type(self).forward(self, hidden),
            r"several times that of layers \[2\]",
        ),
        (
            lambda self, hidden: self.gate(hidden.view(-1, 32)) and hidden,
            r"in layers \[2\] the router ran but its experts did not",
        ),
    ],
    ids=["router bypassed", "router twice", "experts bypassed"],
)
def test_a_layer_that_does_not_go_through_its_router_once_is_seen_before_the_output_is(
    forward_of_block: Callable[..., Any], message: str, context: str
) -> None:
    model, output = FAMILIES[QWEN].build(), None
    bypass(model, 2, forward_of_block)
    entered = replay_routing(model, case(QWEN)[1]) if context == "replay" else record_routing(model)
    with pytest.raises(ReplayError, match=message), entered:
        output = forward(model)
    assert output is None


def test_code_that_overrides_the_choice_between_router_and_experts_is_seen() -> None:
    def overriding(self: Any, hidden: Tensor) -> Tensor:
        flat = hidden.view(-1, 32)
        _, weights, chosen = self.gate(flat)
        return self.experts(flat, (chosen + 1) % 12, weights).view(hidden.shape)

    model = FAMILIES[QWEN].build()
    bypass(model, 3, overriding)
    with pytest.raises(ReplayError, match="experts of layer 3 were given others"), record_routing(model):
        forward(model)


def test_a_router_with_two_top_ks_over_its_experts_is_refused() -> None:
    model = FAMILIES[QWEN].build()
    gate = model.model.layers[2].mlp.gate
    plain = gate.forward
    gate.forward = lambda hidden: (hidden @ gate.weight.T).topk(2) and plain(hidden)
    with pytest.raises(ReplayError, match=r"layer 2 \(.*\) asked 2 times for the top 2 of 12"), record_routing(model):
        forward(model)


@pytest.mark.parametrize("rows", [23, 25])
def test_a_trace_of_other_tokens_is_refused(rows: int) -> None:
    model, own, _ = case(QWEN)
    assert own.tokens is not None
    trace = replace(own, parts=(own.experts.repeat(2, 1, 1)[:rows],), tokens=own.tokens.repeat(2)[:rows], starts=None)
    with pytest.raises(ReplayError, match=f"the routing trace has {rows} rows, the forward pass 24 tokens"):
        replayed(model, trace)


@pytest.mark.parametrize(
    "place, ids, message",
    [
        ((5, 1), [3, 3], r"row 5, layer 2 of the routing trace is \[3, 3\]"),
        ((23, 2), [0, 12], r"row 23, layer 3 of the routing trace is \[0, 12\]; allowed: distinct ids from 0 to 11"),
    ],
    ids=["duplicate", "out of range"],
)
def test_ids_that_no_router_chooses_are_refused_unless_they_are_masked(
    place: tuple[int, int], ids: list[int], message: str
) -> None:
    model, own, plain = case(QWEN)
    experts = own.experts.clone()
    experts[place] = torch.tensor(ids, dtype=torch.uint8)
    with pytest.raises(RoutingError, match=message):
        replayed(model, of(experts, own))
    mask = torch.ones(24, dtype=torch.bool)
    mask[place[0]] = False
    assert replayed(model, of(experts, own), mask).same(plain)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"layers": (0, 1, 2)}, "MoE layers"),
        ({"num_experts": 16}, "experts per layer"),
        ({"parts": (torch.zeros(24, 3, 1, dtype=torch.uint8),)}, "experts per token"),
    ],
    ids=["layers", "experts", "per token"],
)
def test_a_trace_of_another_model_is_refused(change: dict[str, Any], message: str) -> None:
    model, own, _ = case(QWEN)
    fields = {"parts": own.parts, "layers": own.layers, "num_experts": own.num_experts, **change}
    with pytest.raises(RoutingError, match=message):
        replayed(model, RoutingTrace(**fields))


def test_contexts_do_not_nest_and_the_outer_one_goes_on() -> None:
    model, own, plain = FAMILIES[QWEN].build(), *case(QWEN)[1:]
    wrapper = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    with replay_routing(model, own):
        for inner in (record_routing(model), replay_routing(wrapper, own)):
            with pytest.raises(ReplayError, match="already being recorded or replayed"), inner:
                pass
        assert torch.equal(forward(model)[0], plain.logits)


def test_a_replay_that_no_forward_used_is_an_error() -> None:
    model, own, _ = case(QWEN)
    with pytest.raises(ReplayError, match="no forward pass went through the model"), replay_routing(model, own):
        forward(FAMILIES[QWEN].build())


def test_a_copy_made_in_a_context_is_no_part_of_it() -> None:
    model, own, plain = FAMILIES[QWEN].build(), *case(QWEN)[1:]
    with replay_routing(model, another(own)):
        reference = copy.deepcopy(model)
        assert run(reference).same(plain)
        forward(model)
    assert run(reference).same(plain)
    with record_routing(reference) as recording:
        assert run(reference).same(plain)
    assert same(recording.trace, own)


# Nothing stays behind.


CHECKPOINT = "_gradient_checkpointing_func"


def state(model: nn.Module) -> list[Any]:
    """Return what a context could leave: attributes, hooks and checkpoint functions of all modules."""
    return [
        (
            name,
            sorted(vars(module)),
            len(module._forward_hooks),
            len(module._forward_pre_hooks),
            vars(module).get(CHECKPOINT),
        )
        for name, module in model.named_modules()
    ]


@pytest.mark.parametrize("failing", [False, True])
def test_nothing_stays_behind(failing: bool) -> None:
    model, (_, own, plain) = FAMILIES[QWEN].build(), case(QWEN)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    before = state(model)
    for context in (record_routing(model), replay_routing(model, own)):
        try:
            with context:
                forward(model)
                assert state(model) != before
                if failing:
                    raise KeyError
        except KeyError:
            assert failing
        assert state(model) == before
    with replay_routing(model, own):
        loss = forward(model)[1]
    backward(model, loss)  # recomputes, and shadows the routers again for that time
    assert state(model) == before
    assert run(model).same(plain)


# Mask, and the model's own choice beside the replayed one.


def test_rows_outside_the_mask_are_routed_by_the_model_and_counted() -> None:
    model, own, plain = case(QWEN)
    mask = torch.arange(24) % 3 != 0
    other = another(own)
    seen: dict[int, Tensor] = {}
    hooks = [
        router.experts.register_forward_pre_hook(lambda module, args, layer=router.layer: seen.update({layer: args[1]}))
        for router in moe_layout(model).routers
    ]
    with replay_routing(model, other, mask, native=True) as replay:
        first = run(model)
        second = run(model)
    for hook in hooks:
        hook.remove()
    assert (replay.forwards, replay.rows, replay.native_rows) == (2, 48, 16)
    native = replay.native.slice(0, 24)
    for layer in own.layers:
        expected = torch.where(mask[:, None], other.layer(layer), native.layer(layer))
        assert torch.equal(seen[layer], expected)
    assert torch.equal(native.layer(0), own.layer(0))  # nothing was replayed before the first MoE layer
    assert not torch.equal(native.layer(3), own.layer(3))
    assert first.same(second) and not first.same(plain)
    nothing = torch.zeros(24, dtype=torch.bool)
    assert replayed(model, other, nothing).same(plain)


@pytest.mark.parametrize("reentrant", REENTRANT)
def test_a_mask_and_native_recording_survive_checkpointing(reentrant: bool) -> None:
    model, (_, own, _) = FAMILIES[QWEN].build(), case(QWEN)
    mask = torch.arange(24) % 3 != 0
    expected = replayed(model, another(own), mask)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with replay_routing(model, another(own), mask, native=True) as replay:
        assert run(model).same(expected)
    assert (replay.forwards, replay.native.rows) == (1, 24)
