"""verl's Megatron engine around a real megatron-core model, in one process.

Faults that need a hand inside: the engine's `forward_backward_batch` and all that it calls run as they are, one sample per
micro-batch, on a model that this file builds after verl has patched the routers. The whole engine is in
`scenarios_megatron_engine`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

os.environ.update(VERL_PLATFORM="cpu", VERL_ENGINE_DEVICE="cuda", VERL_LOGGING_LEVEL="ERROR")
os.environ.update(VERL_USE_EXTERNAL_MODULES="tests.peers.verl.cpu.platform")

import torch
from mismatch_ext.adapters.verl import megatron
from mismatch_ext.adapters.verl.block import RunMode
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.megatron.router_replay_patch import RouterReplay, RouterReplayAction, apply_router_replay_patch
from verl.workers.config import EngineRouterReplayConfig, McoreEngineConfig
from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

from mismatch_ext.config import MismatchConfig
from mismatch_ext.patching import active_patches
from tests.peers.megatron.cpu import (
    EXPERTS,
    TOP_K,
    VOCABULARY,
    NamedCuda,
    build,
    chosen,
    gradients,
    same,
    start,
)
from tests.peers.verl.in_process.routes import carrying, nested, refused

PROMPTS, RESPONSES = (4, 3, 5), (5, 4, 3)
TOKENS = [9, 7, 8]
LAYERS = (1, 2)  # decoder layer 0 is dense


def causal(tokens: int) -> Tensor:
    """Return what a token does not see `[1, 1, S, S]`."""
    return torch.triu(torch.ones(1, 1, tokens, tokens, dtype=torch.bool), 1)


def built(mode: str, block: MismatchConfig | None = None) -> Any:
    """Return an engine on a new model, with all that its forward and backward passes ask it for.

    Args:
        mode: verl's `router_replay.mode`.
        block: That of our engine; None builds verl's own.
    """
    apply_router_replay_patch()
    # The dispatcher's memory of sequence lengths belongs to one model.
    model = build(num_layers=3, moe_layer_freq=[0, 1, 1], moe_enable_routing_replay=mode != "disabled")
    # The local attention takes verl's mask of padding for one of what to leave out.
    model.register_forward_pre_hook(
        lambda module, args, given: (
            args,
            {**given, "attention_mask": causal((args[0] if args else given["input_ids"]).shape[1])},
        ),
        with_kwargs=True,
    )
    engine: Any = object.__new__(MegatronEngineWithLMHead if block is None else megatron.MismatchMegatronEngine)
    engine.block = block
    engine.engine_config = McoreEngineConfig(
        router_replay=EngineRouterReplayConfig(mode=mode), use_remove_padding=False, pad_bshd_to_minibatch_max=False
    )
    engine.model_config = SimpleNamespace(
        mtp=SimpleNamespace(enable=False),
        hf_config=SimpleNamespace(architectures=["Any"]),
        tokenizer=SimpleNamespace(pad_token_id=0),
        model_type="language_model",
    )
    engine.tf_config, engine.module = model.config, [model]
    engine.enable_routing_replay, engine.mini_layer_topk_idx_list = mode != "disabled", []
    return engine


def routes(seed: int = 7) -> list[Tensor]:
    """Return routes as verl's agent loop hands them on: random, of all decoder layers, a row of zeros for the last token."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for count in TOKENS:
        ids = torch.rand(count, 3, EXPERTS, generator=generator).topk(TOP_K).indices.to(torch.int16)
        ids[:, 0] = 0
        ids[-1] = 0
        found.append(ids)
    return found


def batch(given: list[Tensor] | None = None, flag: bool | None = True) -> TensorDict:
    """Return a batch of three samples as verl's worker hands it to its engine.

    Args:
        given: Routes of each.
        flag: What verl's worker writes about replay.
    """
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, VOCABULARY, (count,), generator=generator) for count in PROMPTS]
    responses = [torch.randint(0, VOCABULARY, (count,), generator=generator) for count in RESPONSES]
    whole = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
    ones = [torch.ones_like(ids) for ids in responses]
    data = TensorDict(
        {
            "prompts": nested(prompts),
            "responses": nested(responses),
            "input_ids": nested(whole),
            "position_ids": nested([torch.arange(len(ids)) for ids in whole]),
            "response_mask": nested(ones),
            "loss_mask": nested(ones),
        },
        batch_size=len(whole),
    )
    if given is not None:
        data["routed_experts"] = nested(given)
    tu.assign_non_tensor(data, temperature=1.0, use_dynamic_bsz=False, micro_batch_size_per_gpu=1, global_batch_size=3)
    tu.assign_non_tensor(data, uid=["first", "second", "third"])
    if flag is not None:
        tu.assign_non_tensor(data, enable_routing_replay=flag)
    return data


def loss(model_output: Any, data: Any, dp_group: Any) -> tuple[Tensor, dict[str, Any]]:
    """Return a loss that every token's log-probability is in."""
    return -model_output["log_probs"].values().sum(), {}


def passed(engine: Any, data: TensorDict, forward_only: bool = False, function: Any = loss) -> dict[str, Any]:
    """Run a batch, and return log-probabilities, gradients and what the routers handed on, by layer and micro-batch."""
    if "routed_experts" in data.keys() and getattr(engine, "block", None) is R3:  # a TensorDict iterates over its rows
        sampled = [torch.cat(pair) for pair in zip(data["prompts"].unbind(), data["responses"].unbind(), strict=True)]
        data["routed_experts"] = carrying(data["routed_experts"], nested(sampled))
    with chosen(engine.module[0]) as maps:
        output = engine.forward_backward_batch(data, None if forward_only else function, forward_only=forward_only)
    logps = [row.clone() for row in output["model_output"]["log_probs"].unbind()]
    recorded = output["model_output"].get("routed_experts")
    return {"logps": logps, "maps": maps, "routes": recorded, "gradients": gradients(engine.module[0]), "out": output}


def left_behind(engine: Any) -> list[Any]:
    """Return the routes that wait for a backward pass, and the action, of each router after a batch whose loss failed."""

    def failing(**_: Any) -> Any:
        raise ArithmeticError

    try:
        passed(engine, batch(routes()), function=failing)
    except ArithmeticError:
        return [
            [len(router.replay_backward_list), router.router_replay_action and router.router_replay_action.value]
            for router in RouterReplay.router_instances
        ]
    raise AssertionError


def alike(one: dict[str, Any], two: dict[str, Any]) -> bool:
    """Tell whether two passes are equal, bit for bit."""
    logps = all(torch.equal(a, b) for a, b in zip(one["logps"], two["logps"], strict=True))
    maps = all(
        torch.equal(a, b) for layer in LAYERS for a, b in zip(one["maps"][layer], two["maps"][layer], strict=True)
    )
    return logps and maps and (same(one["gradients"], two["gradients"]) or not one["gradients"])


def obeyed(maps: dict[int, list[Tensor]], given: list[Tensor], rows_left: int = 1) -> bool:
    """Tell whether the first run of each router for each sample took the given routes, but for its last rows."""
    for layer in LAYERS:
        for sample, ids in enumerate(given):
            for row in range(len(ids) - rows_left):
                if maps[layer][sample][row].nonzero().flatten().tolist() != sorted(ids[row, layer].tolist()):
                    return False
    return True


OFF = {"monitor": {"weight_sync": "off"}}
R3 = MismatchConfig.parse({"routing": {"mode": "R3"}, **OFF})
R2 = MismatchConfig.parse({"routing": {"mode": "R2"}, **OFF})


def spoilt(change: Callable[[list[Tensor]], None]) -> TensorDict:
    """Return a batch whose routes were changed."""
    given = routes()
    change(given)
    return batch(given)


def put(index: Any, value: int) -> Callable[[list[Tensor]], None]:
    """Return the change of some of the second sample's routes."""

    def change(given: list[Tensor]) -> None:
        given[1][index] = value

    return change


def shorten(given: list[Tensor]) -> None:
    given[1] = given[1][:-2]


def add_a_layer(given: list[Tensor]) -> None:
    given[:] = [torch.cat([ids, ids[:, :1]], 1) for ids in given]


SPOILT: dict[str, Callable[[list[Tensor]], None]] = {
    "zeros": put(slice(None), 0),
    "zero_tail": put(slice(4, None), 0),
    "zero_row": put(2, 0),
    "range": put((2, 2, 1), EXPERTS),
    "short": shorten,
    "dense_layer": put((0, 0, 0), 1),
    "layers": add_a_layer,
}


def native_run(engine: Any, action: RouterReplayAction | None) -> Tensor:
    """Run the model under an action of verl's, with no routes given."""
    RouterReplay.clear_global_indices()
    RouterReplay.set_global_router_replay_action(action)
    ids = torch.arange(6)[None]
    try:
        return engine.module[0](ids, torch.arange(6)[None]).detach()
    finally:
        RouterReplay.clear_global_router_replay_action()


def surplus_list(engine: Any) -> dict[str, Any]:
    """Run an R3 batch after another engine's construction has emptied verl's list of routers."""
    known = list(RouterReplay.router_instances)
    apply_router_replay_patch()
    try:
        return passed(engine, batch(routes()), forward_only=True)
    finally:
        RouterReplay.router_instances[:] = known


def mismatched(engine: Any) -> str:
    """Give a router two rows fewer than tokens, behind the check of samples."""
    for router in RouterReplay.router_instances:
        router.set_target_indices(torch.zeros(4, TOP_K, dtype=torch.int64))
        router.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    try:
        return refused(engine.module[0], torch.arange(6)[None], torch.arange(6)[None])
    finally:
        RouterReplay.clear_global_indices()
        RouterReplay.clear_global_router_replay_action()


def bypassed(engine: Any) -> str:
    """Let a router balance its load by itself, past the replay."""
    balanced = engine.module[0].decoder.layers[2].mlp.router
    given = balanced.routing
    balanced.routing = lambda logits, **_: balanced.sinkhorn_load_balancing(logits.flatten(0, 1))
    try:
        return refused(passed, engine, batch(routes()), forward_only=True)
    finally:
        balanced.routing = given


def check_stock() -> dict[str, Any]:
    """Show that verl goes native and drops tokens without an error; return what good batches give."""
    engine = built("R3")
    kept = {
        "native": passed(engine, batch(flag=False), forward_only=True),
        "R3": passed(engine, batch(routes()), forward_only=True),
    }
    native, *others = (
        native_run(engine, action)
        for action in (None, RouterReplayAction.REPLAY_FORWARD, RouterReplayAction.REPLAY_BACKWARD)
    )
    assert all(torch.equal(native, other) for other in others)
    assert alike(surplus_list(engine), kept["native"])
    expert0 = torch.arange(EXPERTS) == 0
    zeros = passed(engine, spoilt(SPOILT["zeros"]), forward_only=True)["maps"]
    assert all(bool((zeros[layer][1][:-1] == expert0).all()) for layer in LAYERS)
    assert obeyed(kept["R3"]["maps"], routes()) and not alike(kept["R3"], kept["native"])
    kept["R3 update"] = passed(built("R3"), batch(routes()))
    # The first sample's routes stay, to be replayed in the next batch's backward pass.
    assert left_behind(built("R3")) == [[1, "replay_backward"]] * 2
    engine = built("R2")
    recorded = list(passed(engine, batch(), forward_only=True)["routes"].unbind())
    kept["R2 update"] = passed(engine, batch(recorded))
    shorten(recorded)
    # The sample has 7 tokens, of which 2 lost their rows: no expert sees them.
    short = passed(engine, batch(recorded))["maps"]
    assert [int(short[layer][1].any(1).sum()) for layer in LAYERS] == [5, 5]
    return kept


def check_good(kept: dict[str, Any]) -> None:
    """Check that good batches are verl's own, bit for bit, and that a batch that fails leaves no routes behind."""
    names = ["verl/megatron_closed_topk"]
    for block, expected in ((MismatchConfig.parse(OFF), []), (R3, names), (R3, names)):
        megatron.register_megatron_engine(block, RunMode())
        assert [patch["name"] for patch in active_patches() if "megatron" in patch["name"]] == expected
    engine = built("R3", R3)
    for given in (routes(), [ids[:-1] for ids in routes()], [ids[:, 1:].contiguous() for ids in routes()]):
        assert alike(passed(engine, batch(given), forward_only=True), kept["R3"])
    assert alike(passed(engine, batch(flag=False), forward_only=True), kept["native"])  # as a reference is scored
    filled = spoilt(SPOILT["zeros"])
    filled["response_mask"] = nested([torch.full((count,), int(row != 1)) for row, count in enumerate(RESPONSES)])
    maps = passed(engine, filled, forward_only=True)["maps"]
    for row in (0, 2):
        assert obeyed({layer: [maps[layer][row]] for layer in LAYERS}, [routes()[row]])
    # A sample without a loss sees in its first layer what it sees without replay.
    assert torch.equal(maps[1][1], kept["native"]["maps"][1][1])
    assert left_behind(engine) == [[0, None]] * 2
    assert alike(passed(engine, batch(routes()), forward_only=True), kept["R3"])
    assert alike(passed(built("R3", R3), batch(routes())), kept["R3 update"])
    engine = built("R2", R2)
    recorded = list(passed(engine, batch(), forward_only=True)["routes"].unbind())
    assert alike(passed(engine, batch(recorded)), kept["R2 update"])


def check_other_tokens() -> None:
    """Check that altered samples are scored natively, and not trained on."""
    engine = built("R3", R3)
    changed = batch(routes())
    rows = [row.clone() for row in changed["input_ids"].unbind()]
    rows[1][0] = (rows[1][0] + 1) % VOCABULARY
    changed["input_ids"] = nested(rows)
    assert "its token ids are others than those that its routes were recorded of (1 of 3 samples)" in refused(
        passed, engine, changed
    )
    flagged = tu.assign_non_tensor(changed.clone(), enable_routing_replay=False)
    stock = passed(engine, flagged, forward_only=True)
    assert alike(passed(engine, changed, forward_only=True), stock)
    assert megatron.guarded()[0].take_others() == 1


def faults() -> dict[str, str]:
    """Return what is said of batches that would not be replayed."""
    engine = built("R3", R3)
    found = {name: refused(passed, engine, spoilt(change), forward_only=True) for name, change in SPOILT.items()}
    found["none"] = refused(passed, engine, batch(), forward_only=True)
    engine = built("R3", R3)
    found["left_out"] = refused(surplus_list, engine)
    for action in (RouterReplayAction.REPLAY_FORWARD, RouterReplayAction.REPLAY_BACKWARD):
        found[action.value] = refused(native_run, engine, action)
    found["bypassed"] = bypassed(engine)
    engine = built("R2", R2)
    recorded = list(passed(engine, batch(), forward_only=True)["routes"].unbind())
    recorded[1][-1] = 0
    found["r2_zero_row"] = refused(passed, engine, batch(recorded))
    found["rows"] = mismatched(engine)
    return found


def everything() -> dict[str, str]:
    """Run all of it, in the order in which patches come; return the refusals."""
    start()
    with NamedCuda():
        kept = check_stock()
        check_good(kept)
        check_other_tokens()
        return faults()
