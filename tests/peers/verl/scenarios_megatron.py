"""verl's Megatron engine around a real megatron-core model, in one process.

Faults that need a hand inside: the engine's `forward_backward_batch` and all that it calls run as they are, one sample per
micro-batch, on a model that this file builds after verl has patched the routers. The whole engine is in
`scenarios_megatron_engine`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

os.environ.update(VERL_PLATFORM="cpu", VERL_ENGINE_DEVICE="cuda", VERL_LOGGING_LEVEL="ERROR")
os.environ.update(VERL_USE_EXTERNAL_MODULES="tests.peers.verl.cpu.platform")

import torch
from mismatch_ext.adapters.verl import megatron
from mismatch_ext.adapters.verl.block import RunMode
from mismatch_ext.adapters.verl.loss import make_loss
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.megatron.router_replay_patch import RouterReplay, RouterReplayAction, apply_router_replay_patch
from verl.workers.config import EngineRouterReplayConfig, McoreActorConfig, McoreEngineConfig
from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import MismatchError
from mismatch_ext.patching import active_patches
from tests.peers.megatron.cpu import (
    EXPERTS,
    RECOMPUTE,
    TOP_K,
    VOCABULARY,
    NamedCuda,
    build,
    chosen,
    gradients,
    same,
    start,
)
from tests.peers.verl.in_process.routes import carrying

PROMPTS, RESPONSES = (4, 3, 5), (5, 4, 3)
TOKENS = [9, 7, 8]
LAYERS = (1, 2)  # decoder layer 0 is dense


def nested(parts: Sequence[Tensor]) -> Tensor:
    """Return a tensor of ragged rows."""
    return torch.nested.as_nested_tensor(list(parts), layout=torch.jagged)


def causal(tokens: int) -> Tensor:
    """Return what a token does not see `[1, 1, S, S]`."""
    return torch.triu(torch.ones(1, 1, tokens, tokens, dtype=torch.bool), 1)


def built(mode: str, recompute: str = "none", block: MismatchConfig | None = None) -> Any:
    """Return an engine on a new model, with all that its forward and backward passes ask it for.

    Args:
        mode: verl's `router_replay.mode`.
        recompute: Which activations are recomputed in the backward pass.
        block: That of our engine; None builds verl's own.
    """
    apply_router_replay_patch()
    # The dispatcher's memory of sequence lengths belongs to one model.
    model = build(
        num_layers=3, moe_layer_freq=[0, 1, 1], moe_enable_routing_replay=mode != "disabled", **RECOMPUTE[recompute]
    )
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
    noise = [torch.full((count,), -3.0) for count in RESPONSES]
    data = TensorDict(
        {
            "prompts": nested(prompts),
            "responses": nested(responses),
            "input_ids": nested(whole),
            "position_ids": nested([torch.arange(len(ids)) for ids in whole]),
            "response_mask": nested(ones),
            "loss_mask": nested(ones),
            "advantages": nested([torch.full((count,), (-1.0) ** row) for row, count in enumerate(RESPONSES)]),
            "old_log_probs": nested(noise),
            "ref_log_prob": nested(noise),
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


def refused(run: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Return the class and message of an error of ours; anything else is raised, and nothing is an answer too."""
    try:
        run(*args, **kwargs)
    except MismatchError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def spoilt(change: Callable[[list[Tensor]], None]) -> list[Tensor]:
    """Return routes after a change."""
    given = routes()
    change(given)
    return given


def fault(name: str) -> list[Tensor]:
    """Return routes of which something is wrong with the second sample's."""

    def change(given: list[Tensor]) -> None:
        ids = given[1]
        match name:
            case "zeros":
                ids.zero_()
            case "zero_tail":
                ids[4:] = 0
            case "zero_row":
                ids[2] = 0
            case "duplicate":
                ids[2, 1] = 3
            case "range":
                ids[2, 2, 1] = EXPERTS
            case "short":
                given[1] = ids[:-2]
            case "long":
                given[1] = torch.cat([ids, ids[:1]])
            case "layers":
                given[:] = [torch.cat([ids, ids[:, :1]], 1) for ids in given]
            case "dense_layer":
                ids[0, 0, 0] = 1

    return spoilt(change)


FAULTS = ("zeros", "zero_tail", "zero_row", "duplicate", "range", "short", "long", "layers", "dense_layer")


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


def stock() -> dict[str, Any]:
    """Show what verl does by itself, and keep what good batches give."""
    found: dict[str, Any] = {}
    engine = built("R3")
    native = passed(engine, batch(flag=False), forward_only=True)
    runs = [
        native_run(engine, action)
        for action in (None, RouterReplayAction.REPLAY_FORWARD, RouterReplayAction.REPLAY_BACKWARD)
    ]
    found["no_target_is_native"], found["empty_queue_is_native"] = (torch.equal(runs[0], run) for run in runs[1:])
    found["left_out_is_native"] = alike(surplus_list(engine), native)
    maps = passed(engine, batch(fault("zeros")), forward_only=True)["maps"]
    expert0 = torch.arange(EXPERTS) == 0
    found["zeros_are_expert_0"] = all(bool((maps[layer][1][:-1] == expert0).all()) for layer in LAYERS)
    keep["r3"] = passed(engine, batch(routes()), forward_only=True)
    found["replay_obeys"] = obeyed(keep["r3"]["maps"], routes())
    found["replay_matters"] = not torch.equal(keep["r3"]["logps"][0], native["logps"][0])
    keep["native"] = native
    for recompute in ("none", "moe", "uniform"):
        keep[recompute] = passed(built("R3", recompute), batch(routes()))
    found["left_behind"] = left_behind(built("R3"))
    engine = built("R2")
    recorded = passed(engine, batch(), forward_only=True)["routes"]
    keep["r2"] = passed(engine, batch(list(recorded.unbind())))
    short = list(recorded.unbind())
    short[1] = short[1][:-2]
    maps = passed(engine, batch(short))["maps"]
    found["short_rows_are_dropped"] = [int(maps[layer][1].any(1).sum()) for layer in LAYERS]
    return found


keep: dict[str, Any] = {}
OFF = MismatchConfig.parse({"monitor": {"weight_sync": "off"}})
R3 = MismatchConfig.parse({"routing": {"mode": "R3"}, "monitor": {"weight_sync": "off"}})
R2 = MismatchConfig.parse({"routing": {"mode": "R2"}, "monitor": {"weight_sync": "off"}})


def checked() -> dict[str, Any]:
    """Run the same with the checks."""
    found: dict[str, Any] = {}
    for block in (OFF, R3, R3):
        megatron.register_megatron_engine(block, RunMode())
        names = [patch["name"] for patch in active_patches() if "megatron" in patch["name"]]
        found.setdefault("patched", []).append(names)
    engine = built("R3", block=R3)
    found["report"] = megatron.MismatchMegatronEngine.mismatch_report(engine)
    found["parameters"] = sum(parameter.numel() for parameter in engine.module[0].parameters())
    found["r3"] = alike(passed(engine, batch(routes()), forward_only=True), keep["r3"])
    found["without_last_row"] = alike(
        passed(engine, batch([ids[:-1] for ids in routes()]), forward_only=True), keep["r3"]
    )
    found["moe_layers_alone"] = alike(
        passed(engine, batch([ids[:, 1:].contiguous() for ids in routes()]), forward_only=True), keep["r3"]
    )
    found["reference_is_native"] = alike(passed(engine, batch(flag=False), forward_only=True), keep["native"])
    filled = batch(fault("zeros"))
    filled["response_mask"] = nested([torch.full((count,), int(row != 1)) for row, count in enumerate(RESPONSES)])
    maps = passed(engine, filled, forward_only=True)["maps"]
    others = [{layer: [maps[layer][row]] for layer in LAYERS} for row in (0, 2)]
    found["others_are_replayed"] = all(
        obeyed(*pair) for pair in zip(others, ([routes()[0]], [routes()[2]]), strict=True)
    )
    # Its first layer sees what it sees without replay.
    found["filler_is_native"] = torch.equal(maps[1][1], keep["native"]["maps"][1][1])
    faults = {name: refused(passed, engine, batch(fault(name)), forward_only=True) for name in FAULTS}
    faults["none"] = refused(passed, engine, batch(), forward_only=True)
    faults["no_flag"] = refused(passed, engine, batch(routes(), flag=None), forward_only=True)
    faults["flag_off"] = refused(passed, engine, batch(routes(), flag=False))
    faults["not_built_for_it"] = refused(passed, built("disabled", block=R3), batch(routes()))
    engine = built("R3", block=R3)
    faults["left_out"] = refused(surplus_list, engine)
    found["left_behind"] = left_behind(engine)
    for action in (RouterReplayAction.REPLAY_FORWARD, RouterReplayAction.REPLAY_BACKWARD):
        faults[action.value] = refused(native_run, engine, action)
    found["after_failure"] = alike(passed(engine, batch(routes()), forward_only=True), keep["r3"])
    balanced = engine.module[0].decoder.layers[2].mlp.router
    given, balanced.routing = (
        balanced.routing,
        lambda logits, **_: balanced.sinkhorn_load_balancing(logits.flatten(0, 1)),
    )
    faults["bypassed"] = refused(passed, engine, batch(routes()), forward_only=True)
    balanced.routing = given
    for recompute in ("none", "moe", "uniform"):
        found[f"update_{recompute}"] = alike(passed(built("R3", recompute, R3), batch(routes())), keep[recompute])
    found["update_obeys"] = obeyed(keep["none"]["maps"], routes())
    engine = built("R2", block=R2)
    recorded = list(passed(engine, batch(), forward_only=True)["routes"].unbind())
    found["r2"] = alike(passed(engine, batch(recorded)), keep["r2"]) and obeyed(keep["r2"]["maps"], wide(recorded), 0)
    short = list(recorded)
    short[1] = short[1][:-2]
    faults["r2_short"] = refused(passed, engine, batch(short))
    zero = [ids.clone() for ids in recorded]
    zero[1][-1] = 0
    faults["r2_zero_row"] = refused(passed, engine, batch(zero))
    faults["rows"] = mismatched(engine)
    found["faults"] = faults
    return found


def other_tokens() -> dict[str, Any]:
    """Give batches whose tokens were changed without their routes."""
    found: dict[str, Any] = {}
    for mode, block in (("R3", R3), ("R2", R2)):
        engine = built(mode, block=block)
        given = routes() if mode == "R3" else list(passed(engine, batch(), forward_only=True)["routes"].unbind())
        changed = batch(given)
        rows = [row.clone() for row in changed["input_ids"].unbind()]
        rows[1][0] = (rows[1][0] + 1) % VOCABULARY
        changed["input_ids"] = nested(rows)
        own = {"update": refused(passed, engine, changed)}
        flagged = changed.clone()
        tu.assign_non_tensor(flagged, enable_routing_replay=False)
        stock = passed(engine, flagged, forward_only=True)
        own["scored_natively"] = alike(passed(engine, changed, forward_only=True), stock)
        own["scored_others"] = megatron.guarded()[0].take_others()
        found[mode] = own
    return found


def wide(recorded: list[Tensor]) -> list[Tensor]:
    """Return routes of the MoE layers as routes of all layers."""
    return [torch.cat([torch.zeros_like(ids[:, :1]), ids], 1) for ids in recorded]


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


def losses() -> dict[str, Any]:
    """Compute verl's loss with a KL term of ours in its Megatron engine, as `set_loss_fn` would install it."""
    config = McoreActorConfig(
        strategy="megatron", rollout_n=1, ppo_micro_batch_size_per_gpu=1, use_dynamic_bsz=False, ppo_mini_batch_size=3
    )
    found = {}
    for name, section in (
        ("plain", None),
        ("kl", {"estimator": "k3", "placement": "loss", "baseline": "none", "coef": 0.5}),
    ):
        block = MismatchConfig.parse({"monitor": {"weight_sync": "off"}, **({"kl": section} if section else {})})
        ran = passed(built("disabled"), batch(flag=None), function=make_loss(config, block))
        found[name] = {"loss": sum(ran["out"]["loss"]), "metrics": sorted(ran["out"]["metrics"])}
        if section is not None:
            found["added"] = 0.5 * float(ran["out"]["metrics"]["kl_loss"].aggregate())
    return found


def everything() -> dict[str, Any]:
    """Run all of it, in the order in which patches come."""
    start()
    with NamedCuda():
        return {
            "losses": losses(),
            "stock": stock(),
            "checked": checked(),
            "other": other_tokens(),
        }
