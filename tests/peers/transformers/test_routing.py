"""Routing record and replay in the real transformers: every family, and every way a model is run around them."""

from __future__ import annotations

import copy
import runpy
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.utils.checkpoint
import transformers
from mismatch_ext.adapters.transformers.routing import moe_layout, record_generation, record_routing, replay_routing
from mismatch_ext.adapters.transformers.routing.families import families_page
from mismatch_ext.adapters.transformers.routing.passes import (
    Pass,
    another,
    backward,
    equal,
    forward,
    run,
    tokens,
    watched,
)
from mismatch_ext.adapters.transformers.routing.proof import CHECKPOINTING, Result, prove
from mismatch_ext.adapters.transformers.routing.replay import Replay
from mismatch_ext.adapters.transformers.routing.tiny import Family, families
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from mismatch_ext.errors import ReplayError, RoutingError
from mismatch_ext.routing import RoutingTrace, align, align_packed
from tests.peers.scenarios import ROOT, Run, named

if TYPE_CHECKING:
    from tests.peers.transformers import scenarios_sharded as scenarios
else:
    scenarios = named("tests.peers.transformers.scenarios_sharded")

FAMILIES = {family.name: family for family in families()}
# All others must be replayable: a family that a new transformers brings is looked at when it is not.
REFUSED = {
    "deepseek_v2 (topk_method=group_limited_greedy)": "topk_method='group_limited_greedy'",
    "deepseek_v4": "DeepseekV4HashRouter selects in another way (tid2eid)",
    "doge": "product keys",
    "ernie4_5_vl_moe_text": "several routers (layers.1.mlp.text_moe and layers.1.mlp.vision_moe)",
    "jetmoe": "several routers",
    "nllb-moe": "NllbMoeTop2Router selects in another way",
    "phimoe": "PhimoeTopKRouter selects in another way (sparsemixer)",
    "switch_transformers": "SwitchTransformersTop1Router selects in another way (max)",
    "vitpose_backbone": "the block is told which to run",
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
    with replay_routing(model, trace, mask):
        return run(model)


def of(experts: Tensor, like: RoutingTrace) -> RoutingTrace:
    """Return a trace of other experts."""
    return RoutingTrace(parts=(experts.to(like.parts[0].dtype),), layers=like.layers, num_experts=like.num_experts)


# Every family.


@cache
def found(name: str) -> Result:
    """Return the result of a family, proven once."""
    return prove(FAMILIES[name])


@pytest.mark.parametrize("name", list(FAMILIES))
def test_family(name: str) -> None:
    result = found(name)
    if name in REFUSED:
        assert (result.verdict, REFUSED[name] in result.note) == ("refused", True), result.note
        assert result.note.startswith(name.split(" ")[0])
    else:
        assert (result.verdict, result.failed) == ("replayable", []), result.note
        assert {(kind, mode) for kind in KINDS for mode in CHECKPOINTING.values()} == {
            (kind, mode)
            for kind in KINDS
            for mode in CHECKPOINTING.values()
            if any(held.startswith(kind) and held.endswith(f", {mode}") for held in result.held)
        }


KINDS = [
    "own routing bit-identical",
    "own routing ran exactly",
    "own routing recomputed",
    "another routing bit-identical",
    "another routing ran exactly",
    "another routing recomputed",
    "interleaved micro-batches",
    "gradients that finite differences are compared with",
]


def test_the_table_in_the_documentation_is_current() -> None:
    # The results of the tests above: in a run of this file each family is proven once.
    page = runpy.run_path(str(ROOT / "docs/generate.py"))["routing_page"]
    assert (ROOT / "docs/routing.md").read_text(encoding="utf-8") == page(
        families_page([found(name) for name in FAMILIES])
    ), "run python docs/generate.py (routing.md)"


def test_no_family_with_experts_and_a_top_k_is_overlooked() -> None:
    models = Path(transformers.__file__).parent / "models"
    seen = {family.config.__module__.split(".")[2] for family in FAMILIES.values()}
    texts = {path.parent.name: path.read_text(encoding="utf-8") for path in models.glob("*/modeling_*.py")}
    assert seen >= {name for name, text in texts.items() if "topk(" in text and "experts" in text}


def broken(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """Return a `Replay.select` whose experts are changed."""
    plain = Replay.select

    def select(self: Replay, layer: int, forward: Any, scores: Tensor, native: Any) -> tuple[Tensor, Tensor]:
        indices = change(plain(self, layer, forward, scores, native)[1])
        return scores.gather(-1, indices), indices

    return select


@pytest.mark.parametrize(
    "change, seen",
    [
        (lambda ids: ids.roll(1, 0), "own routing bit-identical, no checkpoints"),
        (lambda ids: torch.cat([ids[:-1], (ids[-1:] + 1) % 12]), "another routing ran exactly, reentrant"),
    ],
    ids=["rows moved", "last row replaced"],
)
def test_the_proof_of_a_family_sees_wrong_rows(
    change: Callable[[Tensor], Tensor], seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Replay, "select", broken(change))
    result = prove(FAMILIES["mixtral"])
    assert result.verdict == "wrong" and seen in result.failed


def test_the_proof_of_a_family_sees_a_gradient_that_does_not_reach_the_router(monkeypatch: pytest.MonkeyPatch) -> None:
    def select(self: Replay, layer: int, forward: Any, scores: Tensor, native: Any) -> tuple[Tensor, Tensor]:
        indices = self._trace.layer(layer)
        return scores.detach().gather(-1, indices), indices

    monkeypatch.setattr(Replay, "select", select)
    result: Result = prove(FAMILIES["mixtral"])
    assert result.gradient_error is not None and result.gradient_error > 0.5
    assert result.verdict == "wrong"


# Gate weights, from the formulas of the papers and not from the models' code.


@pytest.mark.parametrize(
    "name", ["mixtral", "olmoe", "deepseek_v3"], ids=["softmax of chosen", "softmax of all", "sigmoid, renormalised"]
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
    if name == "mixtral":  # softmax over the chosen, as in arXiv 2510.11370: renormalising cancels the rest of the sum
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


def test_a_dense_model_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ReplayError, match="Sequential: no module of the model has experts"):
        moe_layout(model)


def test_routing_in_the_forward_of_a_block_of_foreign_code_is_found() -> None:
    # As remote code does it: no router module, no config.
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_experts, self.top_k = 4, 2
            self.gate = nn.Linear(3, 4)
            self.experts = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

        def forward(self, hidden: Tensor) -> Tensor:
            weights, chosen = self.gate(hidden).softmax(-1).topk(self.top_k, dim=-1)
            outputs = torch.stack([expert(hidden) for expert in self.experts], -1)
            picked = outputs.gather(-1, chosen[..., None, :].expand(*chosen.shape[:-1], 3, 2))
            return (picked * weights[..., None, :]).sum(-1)

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Block(), Block()])

        def forward(self, hidden: Tensor) -> Tensor:
            for layer in self.layers:
                hidden = layer(hidden)
            return hidden

    torch.manual_seed(0)
    model, hidden = Stack(), torch.randn(2, 5, 3)
    with record_routing(model) as recording:
        plain = model(hidden)
    assert recording.trace.experts.shape == (10, 2, 2)
    with replay_routing(model, recording.trace):
        assert torch.equal(model(hidden), plain)
    with replay_routing(model, of((recording.trace.experts + 1) % 4, recording.trace)):
        assert not torch.equal(model(hidden), plain)


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


class Kernel(nn.Module):
    """What a hub repository offers in the place of a layer: only its forward is taken."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, None]:
        return hidden_states, None


@pytest.mark.parametrize("name, block", [("gpt_oss", "mlp"), ("llama4_text", "feed_forward")])
def test_a_hub_kernel_in_the_place_of_a_moe_block_is_refused(name: str, block: str) -> None:
    model: Any = FAMILIES[name].build()
    own = case(name)[1]
    for layer in own.layers:
        module = getattr(model.model.layers[layer], block)
        module.forward = MethodType(Kernel.forward, module)  # this is all that `kernels.kernelize` does to a module
    contexts: list[Callable[[], Any]] = [lambda: record_routing(model), lambda: replay_routing(model, own)]
    for context in contexts:
        with pytest.raises(ReplayError, match=r"not that of layers \[.*hub kernel that bypasses the router"), context():
            forward(model)


def test_a_hub_kernel_that_leaves_the_router_alone_is_none_of_our_business() -> None:
    model, own, plain = FAMILIES[QWEN].build(), *case(QWEN)[1:]
    for module in [model.model.norm, *(layer.mlp for layer in model.model.layers)]:
        module.forward = MethodType(
            type(module).forward, module
        )  # as kernelize leaves layers that it has no kernel for
    assert replayed(model, own).same(plain)


def test_code_that_overrides_the_choice_between_router_and_experts_is_seen() -> None:
    def overriding(self: Any, hidden: Tensor) -> Tensor:
        flat = hidden.view(-1, 32)
        _, weights, chosen = self.gate(flat)
        return self.experts(flat, (chosen + 1) % 12, weights).view(hidden.shape)

    model = FAMILIES[QWEN].build()
    bypass(model, 3, overriding)
    with pytest.raises(ReplayError, match="experts of layer 3 were given others"), record_routing(model):
        forward(model)


def test_a_copied_choice_is_still_the_choice() -> None:
    def copying(self: Any, hidden: Tensor) -> Tensor:
        flat = hidden.view(-1, 32)
        _, weights, chosen = self.gate(flat)
        return self.experts(flat, chosen.clone(), weights).view(hidden.shape)

    model = FAMILIES[QWEN].build()
    bypass(model, 3, copying)
    assert replayed(model, case(QWEN)[1]).same(case(QWEN)[2])


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
    trace = of(own.experts.repeat(2, 1, 1)[:rows], own)
    with pytest.raises(ReplayError, match=f"layer 0: the routing trace has {rows} rows, the forward pass 24 tokens"):
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


def test_distant_duplicates_and_wide_ids_are_refused() -> None:
    # 300 experts need uint16.
    from mismatch_ext.adapters.transformers.routing.replay import _refuse_ids

    good = torch.tensor([[[10, 11, 12, 13, 299, 15]]])
    for ids, wrong in (
        (good, False),
        (torch.tensor([[[10, 11, 12, 13, 14, 10]]]), True),
        (torch.tensor([[[10, 11, 12, 13, 11, 15]]]), True),
        (torch.tensor([[[10, 11, 12, 10, 14, 15]]]), True),
        (torch.tensor([[[10, 11, 12, 13, 300, 15]]]), True),
    ):
        trace = RoutingTrace(parts=(good.to(torch.uint16), ids.to(torch.uint16)), layers=(4,), num_experts=300)
        if wrong:
            with pytest.raises(RoutingError, match="row 1, layer 4"):
                _refuse_ids(trace, None)
        else:
            _refuse_ids(trace, None)


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


@pytest.mark.parametrize("mask", [torch.ones(23, dtype=torch.bool), torch.ones(24)], ids=["length", "dtype"])
def test_a_mask_that_does_not_fit_is_refused(mask: Tensor) -> None:
    model, own, _ = case(QWEN)
    with pytest.raises(RoutingError, match="mask is torch"):
        replayed(model, own, mask)


def test_contexts_do_not_nest_and_the_outer_one_goes_on() -> None:
    model, own, plain = FAMILIES[QWEN].build(), *case(QWEN)[1:]
    wrapper = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    with replay_routing(model, own):
        for inner in (record_routing(model), replay_routing(wrapper, own)):
            with pytest.raises(ReplayError, match="already being recorded or replayed"), inner:
                pass
        assert torch.equal(forward(model)[0], plain.logits)


def test_two_models_can_be_in_contexts_at_once() -> None:
    one, other = FAMILIES[QWEN].build(), FAMILIES["mixtral"].build()
    with replay_routing(one, another(case(QWEN)[1])), record_routing(other) as recording:
        first, second = run(one), run(other)
    assert first.same(replayed(case(QWEN)[0], another(case(QWEN)[1])))
    assert second.same(case("mixtral")[2]) and recording.trace.same_as(case("mixtral")[1])


def test_a_replay_that_no_forward_used_is_an_error() -> None:
    model, own, _ = case(QWEN)
    with pytest.raises(ReplayError, match="no forward pass went through the model"), replay_routing(model, own):
        forward(FAMILIES[QWEN].build())


def test_a_recording_of_nothing_has_no_trace() -> None:
    with record_routing(case(QWEN)[0]) as recording:
        pass
    with pytest.raises(ReplayError, match="no forward pass was recorded"):
        _ = recording.trace


def test_contexts_of_two_threads_may_end_in_any_order() -> None:
    # What checkpoints are tied with is the whole process's: the first to leave must not take it from the other.
    models = {name: FAMILIES[name].build() for name in (QWEN, "mixtral")}
    traces = {name: another(case(name)[1]) for name in models}
    expected = {name: replayed(case(name)[0], trace) for name, trace in traces.items()}
    before, got = state(models[QWEN]), {}
    first_entered, second_entered, first_left = threading.Event(), threading.Event(), threading.Event()

    def first() -> None:
        with replay_routing(models[QWEN], traces[QWEN]):
            first_entered.set()
            assert second_entered.wait(60)
            loss = forward(models[QWEN])[1]
        first_left.set()
        got[QWEN] = backward(models[QWEN], loss)

    def second() -> None:
        assert first_entered.wait(60)
        with replay_routing(models["mixtral"], traces["mixtral"]):
            second_entered.set()
            assert first_left.wait(60)
            loss = forward(models["mixtral"])[1]
        got["mixtral"] = backward(models["mixtral"], loss)

    for model in models.values():
        model.gradient_checkpointing_enable({"use_reentrant": True})
    threads = [threading.Thread(target=work) for work in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(equal(got[name], expected[name].gradients) for name in models)
    assert state(models[QWEN])[1:] == before[1:]


def test_a_copy_made_in_a_context_is_no_part_of_it() -> None:
    model, own, plain = FAMILIES[QWEN].build(), *case(QWEN)[1:]
    with replay_routing(model, another(own)):
        reference = copy.deepcopy(model)
        assert run(reference).same(plain)
        forward(model)
    assert run(reference).same(plain)


# Nothing stays behind.


def state(model: nn.Module) -> list[Any]:
    """Return what a context could leave: attributes and hooks of all modules, and torch's own functions."""
    modules = [
        (name, sorted(vars(module)), len(module._forward_hooks), len(module._forward_pre_hooks))
        for name, module in model.named_modules()
    ]
    checkpoint: Any = torch.utils.checkpoint
    return [modules, checkpoint.CheckpointFunction, checkpoint._checkpoint_without_reentrant_generator]


@pytest.mark.parametrize("failing", [False, True])
def test_nothing_stays_behind(failing: bool) -> None:
    model, (_, own, plain) = FAMILIES[QWEN].build(), case(QWEN)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    before = state(model)
    for context in (record_routing(model), replay_routing(model, own), record_generation(model)):
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


def test_a_forward_that_was_somebody_elses_before_is_put_back() -> None:
    model, own, plain = FAMILIES[QWEN].build(), *case(QWEN)[1:]
    decoder = model.model
    original, calls = decoder.forward, []

    def hooked(*args: Any, **kwargs: Any) -> Any:  # as accelerate's hooks are put
        calls.append(1)
        return original(*args, **kwargs)

    decoder.forward = hooked
    assert replayed(model, own).same(plain)
    assert decoder.forward is hooked and len(calls) == 1


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


def test_native_is_refused_where_it_was_not_asked_for() -> None:
    model, own, _ = case(QWEN)
    with replay_routing(model, own) as replay:
        forward(model)
    with pytest.raises(ReplayError, match="native=True"):
        _ = replay.native


def test_replay_without_a_mask_does_not_run_the_top_k() -> None:
    model, own, plain = case(QWEN)
    with replay_routing(model, own), torch.profiler.profile() as profile:
        logits = forward(model)[0]
    assert torch.equal(logits, plain.logits)
    assert "aten::topk" not in {event.key for event in profile.key_averages()}


def test_recordings_of_several_passes_follow_each_other() -> None:
    model, own, _ = case(QWEN)
    with torch.no_grad(), record_routing(model, version=3) as recording:
        forward(model)
        model(input_ids=tokens()[:1, :5], use_cache=False)
    assert recording.trace.rows == 29 and recording.trace.versions == ((0, 3),)
    assert torch.equal(recording.trace.slice(0, 24).experts, own.experts)


def test_more_experts_than_a_byte_counts() -> None:
    config = transformers.Qwen3MoeConfig(
        **{"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8},
        **{"num_experts": 300, "num_experts_per_tok": 4, "moe_intermediate_size": 8, "num_key_value_heads": 2},
    )
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(config)
    plain = run(model)
    with record_routing(model) as recording:
        forward(model)
    own = recording.trace
    assert own.parts[0].dtype == torch.uint16 and int(own.layer(0).max()) > 255
    assert replayed(model, own).same(plain)
    with watched(moe_layout(model)) as seen:
        got = replayed(model, another(own))
    assert seen.ran(another(own), got.gradients)


def test_a_language_model_inside_a_multimodal_one() -> None:
    text = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
    text |= {"num_key_value_heads": 2, "num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}
    torch.manual_seed(0)
    model: Any = transformers.Qwen3VLMoeForConditionalGeneration(
        transformers.Qwen3VLMoeConfig(
            text_config={**text, "rope_parameters": rope},
            vision_config={**vision, "deepstack_visual_indexes": [0]},
        )
    )
    layout = moe_layout(model)
    assert (layout.layers, layout.decoder) == ((0, 1), model.model.language_model)
    plain = run(model)
    with record_routing(model) as recording:
        forward(model)
    assert replayed(model, recording.trace).same(plain)
    assert not replayed(model, another(recording.trace)).same(plain)


def test_the_load_balancing_loss_of_transformers_ignores_replay() -> None:
    # It asks for a top-k of its own, outside the routers: a fact that the documentation states.
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    model, own, _ = case("qwen3_moe")
    with torch.no_grad(), replay_routing(model, another(own)):
        output = model(input_ids=tokens(), use_cache=False, output_router_logits=True)
    expected = load_balancing_loss_func(output.router_logits, 12, 2)
    assert len(output.router_logits) == 4 and torch.equal(output.aux_loss, expected)
    chosen = torch.cat([another(own).layer(layer) for layer in own.layers])
    share = nn.functional.one_hot(chosen, 12).float().mean(0)
    weight = torch.cat(output.router_logits).softmax(-1).mean(0)
    assert abs(float((share * weight).sum()) * 12 - float(expected)) > 1e-3


# Checkpointing.


def enable(model: Any, how: str) -> None:
    """Enable checkpointing in one of the ways that trainers do."""
    kind, _, mode = how.partition(" ")
    reentrant = mode == "reentrant"
    if kind == "model":
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    elif kind == "context_fn":
        from contextlib import nullcontext

        model.gradient_checkpointing_enable(
            {"use_reentrant": False, "context_fn": lambda: (nullcontext(), nullcontext())}
        )
    elif kind == "wrapper":  # as FSDP's activation checkpointing does
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl

        implementation = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
        layers = model.model.layers
        for index in range(len(layers)):
            layers[index] = checkpoint_wrapper(layers[index], checkpoint_impl=implementation)


WAYS = ["model reentrant", "model saved", "context_fn saved", "wrapper reentrant", "wrapper saved"]


@pytest.mark.parametrize(
    "when, way",
    [("before", way) for way in WAYS] + [("inside", way) for way in WAYS if not way.startswith("wrapper")],
)
def test_checkpointing_enabled_before_or_inside_the_context(when: str, way: str) -> None:
    model, (reference, own, _) = FAMILIES[QWEN].build(), case(QWEN)
    trace = another(own)
    expected = replayed(reference, trace)
    if when == "before":
        enable(model, way)
    with replay_routing(model, trace):
        if when == "inside":
            enable(model, way)
        got = run(model)
    assert torch.equal(got.logits, expected.logits)
    renamed = {name.replace("_checkpoint_wrapped_module.", ""): grad for name, grad in got.gradients.items()}
    assert equal(renamed, expected.gradients)


@pytest.mark.parametrize("reentrant", REENTRANT)
def test_the_whole_model_in_one_checkpoint(reentrant: bool) -> None:
    model, own, _ = case(QWEN)
    trace = another(own)
    expected = replayed(model, trace)

    def logits(embedded: Tensor) -> Tensor:
        return model(inputs_embeds=embedded, use_cache=False).logits

    embedded = model.get_input_embeddings()(tokens()).detach().requires_grad_()
    with watched(moe_layout(model)) as seen, replay_routing(model, trace) as replay:
        output = torch.utils.checkpoint.checkpoint(logits, embedded, use_reentrant=reentrant)
        targets = tokens().roll(-1, 1)[..., None]
        gradients = backward(model, -output.log_softmax(-1).gather(-1, targets).mean())
    assert torch.equal(output, expected.logits) and seen.times() == {2} and replay.forwards == 1
    expected.gradients.pop("model.embed_tokens.weight")
    gradients.pop("model.embed_tokens.weight", None)
    assert equal(gradients, expected.gradients)


@pytest.mark.parametrize("way", ["composable", "foreign"])
def test_checkpoints_that_cannot_be_bound_are_refused_in_the_forward(way: str) -> None:
    model, (_, own, _) = FAMILIES[QWEN].build(), case(QWEN)
    if way == "composable":
        composable_checkpoint(model.model.layers[2])
        message = "layer 2 runs in a checkpoint that is not torch.utils.checkpoint's"
    else:
        # As DeepSpeed's: a function of its own that runs without gradients and recomputes in backward.
        layer = model.model.layers[3]
        plain = layer.forward

        def without(*args: Any, **kwargs: Any) -> Any:
            with torch.no_grad():
                return plain(*args, **kwargs)

        layer.forward = without
        message = "layer 3 runs in a checkpoint that is not torch.utils.checkpoint's, or without gradients"
    with pytest.raises(ReplayError, match=message), replay_routing(model, own):
        forward(model)
    with record_routing(model) as recording:  # recomputes what it chose itself, whoever does it
        backward(model, forward(model)[1])
    assert recording.trace.same_as(own)


@pytest.mark.parametrize("reentrant", REENTRANT)
def test_backward_passes_of_other_forwards_in_a_context(reentrant: bool) -> None:
    model, (_, own, plain) = FAMILIES[QWEN].build(), case(QWEN)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    other, third = another(own), another(another(own))
    expected = [replayed(model, trace).gradients for trace in (other, third)]
    before = forward(model)[1]
    with replay_routing(model, other):
        first = forward(model)[1]
    with replay_routing(model, third) as replay:
        second = forward(model)[1]
        assert equal(backward(model, before), plain.gradients)
        assert equal(backward(model, first), expected[0])
        assert equal(backward(model, second), expected[1])
    assert replay.forwards == 1
    with record_routing(model) as recording:
        loss = forward(model)[1]
        with pytest.raises(ReplayError, match="already"), replay_routing(model, own):
            pass
        backward(model, loss)
    assert recording.trace.same_as(own)


@pytest.mark.parametrize("reentrant", REENTRANT)
def test_a_backward_pass_in_the_midst_of_a_forward(reentrant: bool) -> None:
    # What is recomputed then is no part of the forward pass that is going on.
    model, (_, own, plain) = FAMILIES[QWEN].build(), case(QWEN)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    expected = replayed(case(QWEN)[0], another(own)).gradients
    with replay_routing(model, another(own)):
        loss = forward(model)[1]
    got: list[dict[str, Tensor]] = []
    handle = model.model.norm.register_forward_hook(lambda *_: None if got else got.append(backward(model, loss)))
    with replay_routing(model, own):
        assert torch.equal(forward(model)[0], plain.logits)
    handle.remove()
    assert equal(got[0], expected)


@pytest.mark.parametrize("reentrant", REENTRANT)
def test_recomputation_in_another_thread(reentrant: bool) -> None:
    # Autograd runs the backward pass of a GPU in a thread of its own.
    model, (_, own, _) = FAMILIES[QWEN].build(), case(QWEN)
    expected = replayed(model, another(own))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with replay_routing(model, another(own)):
        loss = forward(model)[1]
    model.zero_grad()
    with replay_routing(model, own):
        forward(model)
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    got = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert equal(got, expected.gradients)


def test_gradients_without_binding_would_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    # What the binding is for: without it, recomputation takes the model's own routes and gradients change silently.
    from mismatch_ext.adapters.transformers.routing import binding

    monkeypatch.setattr(binding._Bound, "bound", lambda self, function: function)
    monkeypatch.setattr(binding, "runs_unbound", lambda gradients: False)
    model, (_, own, _) = FAMILIES[QWEN].build(), case(QWEN)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    expected = replayed(case(QWEN)[0], another(own))
    with replay_routing(model, another(own)):
        logits, loss = forward(model)
    assert torch.equal(logits, expected.logits)
    assert not equal(backward(model, loss), expected.gradients)


# Batches.


def sequences() -> list[Tensor]:
    """Return token sequences of different lengths."""
    generator = torch.Generator().manual_seed(9)
    return [torch.randint(3, 96, (length,), generator=generator) for length in (7, 12, 4)]


def alone(model: Any, traces: list[RoutingTrace]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the logits of each sequence by itself and the gradients of their summed losses."""
    model.zero_grad()
    outputs = []
    for ids, trace in zip(sequences(), traces, strict=True):
        with replay_routing(model, trace):
            outputs.append(model(input_ids=ids[None], use_cache=False).logits[0])
        outputs[-1].logsumexp(-1).sum().backward()
    return [x.detach() for x in outputs], {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def compare(model: Any, outputs: list[Tensor], traces: list[RoutingTrace]) -> None:
    """Compare logits and gradients with those of each sequence by itself; other shapes of products round otherwise."""
    model.zero_grad()
    torch.stack([x.logsumexp(-1).sum() for x in outputs]).sum().backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    expected, expected_gradients = alone(model, traces)
    for got, wanted in zip(outputs, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=2e-5)
    for name, wanted in expected_gradients.items():
        torch.testing.assert_close(gradients[name], wanted, rtol=1e-3, atol=1e-4)


def other_routes(model: Any) -> list[RoutingTrace]:
    """Return a routing per sequence, with rows for all of its tokens, that is not the model's own."""
    traces = []
    for ids in sequences():
        with torch.no_grad(), record_routing(model) as recording:
            model(input_ids=ids[None], use_cache=False)
        traces.append(another(recording.trace))
    return traces


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", [QWEN, "deepseek_v3"])
def test_padding(name: str, side: str) -> None:
    model = case(name)[0]
    traces = other_routes(model)
    ids, mask = torch.zeros(3, 14, dtype=torch.long), torch.zeros(3, 14, dtype=torch.long)
    places = []
    for row, sequence in enumerate(sequences()):
        first = 14 - len(sequence) if side == "left" else 0
        places.append(slice(first, first + len(sequence)))
        ids[row, places[-1]], mask[row, places[-1]] = sequence, 1
    trace, recorded = align(traces, mask)
    with replay_routing(model, trace, recorded) as replay:
        logits = model(input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
    assert (replay.rows, replay.native_rows) == (42, 42 - 23)
    compare(model, [logits[row, place] for row, place in enumerate(places)], traces)


@pytest.mark.parametrize("name", [QWEN, "deepseek_v3"])
def test_packed_sequences(name: str) -> None:
    model = case(name)[0]
    traces, lengths = other_routes(model), [len(ids) for ids in sequences()]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    trace, recorded = align_packed(traces, lengths)
    assert recorded.all()
    with replay_routing(model, trace, recorded):
        logits = model(input_ids=torch.cat(sequences())[None], position_ids=positions, use_cache=False).logits[0]
    compare(model, list(logits.split(lengths)), traces)


def test_a_missing_last_row_is_routed_natively() -> None:
    # What engines give: the last sampled token has no row. It changes its own logits at most.
    model = case(QWEN)[0]
    whole = other_routes(model)[1]
    ids = sequences()[1][None]
    trace, recorded = align([whole.slice(0, 11)], torch.ones(1, 12))
    with torch.no_grad():
        with replay_routing(model, trace, recorded) as replay:
            got = model(input_ids=ids, use_cache=False).logits[0]
        with replay_routing(model, whole):
            expected = model(input_ids=ids, use_cache=False).logits[0]
    assert replay.native_rows == 1
    torch.testing.assert_close(got[:-1], expected[:-1], rtol=1e-4, atol=1e-5)
    assert (got[-1] - expected[-1]).abs().max() > 1e-3


# Experts' implementations and dtypes.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("experts", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_implementations_of_the_experts(name: str, experts: str, dtype: torch.dtype) -> None:
    model, own, plain = case(name, dtype, experts)
    assert model.config._experts_implementation == experts
    assert replayed(model, own).same(plain)
    expected = replayed(model, another(own))
    assert not torch.equal(expected.logits, plain.logits)
    checkpointed = FAMILIES[name].build(dtype, experts=experts)
    for reentrant in REENTRANT:
        checkpointed.gradient_checkpointing_enable({"use_reentrant": reentrant})
        assert replayed(checkpointed, another(own)).same(expected)


def test_autocast() -> None:
    model = case(QWEN)[0]
    with torch.autocast("cpu", torch.bfloat16):
        with record_routing(model) as recording:
            plain = run(model)
        assert replayed(model, recording.trace).same(plain)


# PEFT.

TUNED = {
    "attention": (QWEN, {"target_modules": ["q_proj", "v_proj"]}),
    "experts": (
        QWEN,
        {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
    ),
    "router parameter": (QWEN, {"target_modules": ["q_proj"], "target_parameters": ["mlp.gate.weight"]}),
    "router module": ("jamba", {"target_modules": ["router"]}),
    "saved router": (QWEN, {"target_modules": ["q_proj"], "modules_to_save": ["gate"]}),
    "saved block": (QWEN, {"target_modules": ["q_proj"], "modules_to_save": ["mlp"]}),
}


@pytest.mark.parametrize("what", list(TUNED))
def test_peft(what: str) -> None:
    name, settings = TUNED[what]
    torch.manual_seed(0)
    model: Any = get_peft_model(FAMILIES[name].build(), LoraConfig(r=4, lora_dropout=0.0, **settings)).train()
    for parameter_name, parameter in model.named_parameters():
        if "lora_B" in parameter_name:
            torch.nn.init.normal_(parameter, 0, 0.1)
    assert moe_layout(model).layers == case(name)[1].layers
    plain = run(model)
    with record_routing(model) as recording:
        assert run(model).same(plain)
    own = recording.trace
    assert replayed(model, own).same(plain)
    expected = replayed(model, another(own))
    with torch.no_grad(), replay_routing(model, another(own)), model.disable_adapter():
        base = forward(model)[0]
    assert torch.equal(base, replayed(case(name)[0], another(own)).logits)
    assert not torch.equal(base, expected.logits)
    for reentrant in REENTRANT:
        model.base_model.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        assert replayed(model, another(own)).same(expected)


# Distributed.


@pytest.mark.engine
@pytest.mark.parametrize(
    "world, name, how", [(1, QWEN, "fsdp2"), (2, "deepseek_v3", "fsdp2"), (2, QWEN, "ddp")], ids=str
)
def test_sharded_and_replicated(run: Run, world: int, name: str, how: str) -> None:
    ranks = run(scenarios.sharded, world=world, family=name, how=how).expect()
    assert len(ranks) == world
    for results in ranks:
        assert set(results) == {"None", "True", "False"}
        for result in results.values():
            assert result["logits"] and result["names"] and result["gradients"] <= 1e-6


# torch.compile.


def compiled(how: str, experts: str = "batched_mm", **settings: Any) -> Any:
    """Return a model compiled in one of the ways that trainers do it."""
    torch._dynamo.reset()
    model: Any = FAMILIES[QWEN].build(experts=experts)
    for layer in model.model.layers if how == "layers" else ():
        layer.compile(**settings)
    if how == "method":
        model.compile(**settings)
    return torch.compile(model, **settings) if how == "model" else model


@pytest.mark.parametrize(
    "how, experts, backend, reentrant",
    [
        ("layers", "batched_mm", "aot_eager", None),
        ("layers", "batched_mm", "aot_eager", True),
        ("layers", "batched_mm", "aot_eager", False),
        ("model", "batched_mm", "aot_eager", False),
        ("method", "batched_mm", "aot_eager", None),
        # aot_eager itself, without any of our code, sums the gradients of grouped_mm in another order than eager mode.
        ("layers", "grouped_mm", "eager", False),
    ],
)
def test_compiled_models(how: str, experts: str, backend: str, reentrant: bool | None) -> None:
    reference, own, plain = case(QWEN, experts=experts)
    other = another(own)
    expected = replayed(reference, other)
    model = compiled(how, experts, backend=backend)
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})

    def same(got: Pass, wanted: Pass) -> bool:
        return Pass(got.logits, {n.removeprefix("_orig_mod."): g for n, g in got.gradients.items()}).same(wanted)

    assert same(run(model), plain)  # compiled before any context: what was compiled then must not be run in one
    for _ in range(2):
        assert same(replayed(model, other), expected)
        assert same(replayed(model, own), plain)
    with record_routing(model) as recording:
        assert same(run(model), plain)
    assert recording.trace.same_as(own)
    with replay_routing(model, other):
        first = forward(model)[1]
    with replay_routing(model, own):
        second = forward(model)[1]
    assert same(Pass(plain.logits, backward(model, second)), plain)
    assert same(Pass(expected.logits, backward(model, first)), expected)
    assert same(run(model), plain)


@pytest.mark.parametrize("how", ["layers", "model"])
def test_contexts_do_not_make_compiled_code_compile_anew(how: str) -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model, trace = compiled(how, backend=backend), case(QWEN, experts="batched_mm")[1]
    replayed(model, trace)
    counts = []
    for _ in range(10):  # as many as torch compiles of one function before it gives up
        trace = another(trace)
        replayed(model, trace)
        counts.append(len(graphs))
    assert counts[0] and set(counts) == {counts[0]}


def test_a_model_compiled_as_one_graph_is_refused() -> None:
    # Replay needs a break at the router, and fullgraph=True forbids any: torch says so, and nothing runs natively.
    model = compiled("layers", backend="eager", fullgraph=True)
    assert run(model).same(case(QWEN, experts="batched_mm")[2])
    with pytest.raises(torch._dynamo.exc.Unsupported), replay_routing(model, case(QWEN)[1]):
        forward(model)


# Generation.


def generate(model: Any, **settings: Any) -> tuple[Tensor, Tensor]:
    """Sample from prompts of which two are padded; return them and the mask of their real tokens."""
    ids = torch.randint(3, 96, (3, 6), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    for row, padding in ((0, 3), (2, 1)):
        ids[row, :padding], mask[row, :padding] = 0, 0
    torch.manual_seed(1)
    settings = {"do_sample": True, "max_new_tokens": 8, "pad_token_id": 0, "suppress_tokens": [0], **settings}
    return model.generate(ids, attention_mask=mask, **settings), mask


def check_generated(model: Any, output: Tensor, traces: list[RoutingTrace], ends: set[int]) -> list[int]:
    """Compare each trace with the routing of its sequence in a forward by itself, cut after the end by hand."""
    assert len(traces) == len(output)
    rows = []
    for sequence, trace in zip(output.tolist(), traces, strict=True):
        prompt, response = [t for t in sequence[:6] if t != 0], sequence[6:]
        stop = next((place for place, token in enumerate(response) if token in ends), len(response) - 1)
        real = prompt + response[: stop + 1]
        with torch.no_grad(), record_routing(model) as recording:
            model(input_ids=torch.tensor([real]), use_cache=False)
        assert trace.start == 0 and torch.equal(trace.experts, recording.trace.experts[:-1])
        rows.append(trace.rows)
    return rows


@pytest.mark.parametrize("name", [QWEN, "deepseek_v3", "gpt_oss", "llama4_text", "qwen3_next"])
def test_generation(name: str) -> None:
    model = FAMILIES[name].build().eval()
    ends = set(range(3, 20))
    with record_generation(model, version=7) as recording:
        output, _ = generate(model, num_return_sequences=2, eos_token_id=sorted(ends))
        assert len(recording.traces) == 6  # there while the context lasts, as a training loop wants them
    rows = check_generated(model, output, recording.traces, ends)
    assert len(set(rows)) > 2  # sequences that ended early, and prompts of different lengths
    assert all(trace.versions == ((0, 7),) for trace in recording.traces)


def test_generation_without_an_end_token_and_greedy_and_again() -> None:
    model = FAMILIES[QWEN].build().eval()
    model.generation_config.eos_token_id = None
    with record_generation(model) as recording:
        one, _ = generate(model, do_sample=False)
        two, _ = generate(model, return_dict_in_generate=False)
    rows = check_generated(model, torch.cat([one, two]), recording.traces, set())
    assert rows == [3 + 7, 6 + 7, 5 + 7] * 2


def test_generation_through_peft() -> None:
    model: Any = get_peft_model(FAMILIES[QWEN].build(), LoraConfig(target_modules=["q_proj"])).eval()
    with record_generation(model) as recording:
        output, _ = generate(model, eos_token_id=2)
    check_generated(model, output, recording.traces, {2})


def test_generated_traces_are_replayed() -> None:
    model = FAMILIES[QWEN].build()
    with record_generation(model.eval()) as recording:
        output, mask = generate(model, eos_token_id=list(range(3, 20)))
    real = torch.zeros_like(output)
    for row, trace in enumerate(recording.traces):
        first = int((mask[row] == 0).sum())
        real[row, first : first + trace.rows + 1] = 1
    trace, recorded = align(recording.traces, real)
    assert int(recorded.sum()) == sum(t.rows for t in recording.traces)
    with replay_routing(model.train(), trace, recorded, native=True) as replay:
        model(input_ids=output, attention_mask=real, use_cache=False).logits.sum().backward()
    assert torch.equal(replay.native.experts[recorded], trace.experts[recorded])


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"num_beams": 2, "do_sample": False}, "num_beams=2 cannot be recorded"),
        ({"use_cache": False}, "ran 3 x .* through the routers, not 3 x"),
        ({"prompt_lookup_num_tokens": 2, "do_sample": False}, "prompt_lookup_num_tokens=2"),
        ({"assistant_model": "any"}, "assisted"),
    ],
    ids=["beams", "no cache", "lookup", "assistant"],
)
def test_generation_whose_tokens_are_not_routed_one_by_one_is_refused(settings: dict[str, Any], message: str) -> None:
    model = FAMILIES[QWEN].build().eval()
    with pytest.raises(ReplayError, match=message), record_generation(model):
        generate(model, **settings)


def test_a_model_that_cannot_generate_is_refused() -> None:
    model = FAMILIES["qwen3_vl_moe_text"].build()
    with pytest.raises(ReplayError, match=r"has no generate\(\)"), record_generation(model):
        pass


def test_every_family_has_a_name_of_its_own() -> None:
    assert len({family.name for family in families()}) == len(list(families())) == len(FAMILIES)
    assert isinstance(FAMILIES[QWEN], Family) and set(REFUSED) <= set(FAMILIES)
