"""verl's whole Megatron engine in our worker.

One process on a CPU. verl's configuration, worker, engine, optimizer and checkpoint manager are the real ones, and so is
Megatron-Bridge; the layers are megatron-core's own (`cpu/megatron_engine.py`), and samples are packed. Only Ray and the
rollout are absent.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
from typing import Any

os.environ.update(VERL_PLATFORM="cpu", VERL_ENGINE_DEVICE="cuda", VERL_LOGGING_LEVEL="ERROR")
os.environ.update(VERL_USE_EXTERNAL_MODULES="tests.peers.verl.cpu.platform", CUDA_DEVICE_MAX_CONNECTIONS="1")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("RANK", "0")
os.environ.setdefault("LOCAL_WORLD_SIZE", "1")
os.environ.setdefault("LOCAL_RANK", "0")

import torch
from mismatch_ext.adapters.verl.config import prepare
from omegaconf import DictConfig, open_dict
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu

from tests.peers.megatron.cpu import chosen
from tests.peers.verl.cpu.megatron_engine import CALLED, OVERRIDES, engine_in_float32, megatron_on_cpu
from tests.peers.verl.in_process.routes import as_rollout, carrying, nested, other, refused

PROMPTS, RESPONSES = (6, 5, 4, 6), (8, 7, 6, 3)
TOKENS = [prompt + response for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
LAYERS, EXPERTS, TOP_K = 2, 16, 4
OFF = {"monitor": {"weight_sync": "off"}}
R3 = {"routing": {"mode": "R3"}, **OFF}
R2 = {"routing": {"mode": "R2"}, **OFF}
LED = {"lr": {"period": 2}, **OFF}
FLOAT32 = "actor_rollout_ref.actor.megatron.dtype=float32"
OPTIM = "actor_rollout_ref.actor.optim"
CONSTANT = (
    f"{OPTIM}.lr=1e-4",
    f"{OPTIM}.lr_decay_style=constant",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
)
COSINE = (f"{OPTIM}.lr=1e-4", f"{OPTIM}.lr_warmup_steps=2", f"{OPTIM}.lr_decay_style=cosine")


def configured(model: str, block: dict[str, Any] | None, *overrides: str) -> DictConfig:
    """Return verl's own configuration of a Megatron run, after the driver's part of ours, if there is a block."""
    from hydra import compose, initialize_config_module

    group = "actor_rollout_ref"
    given = {
        f"{group}.model.path": model,
        f"{group}.rollout.name": "vllm",
        f"{group}.rollout.calculate_log_probs": True,
        f"{group}.rollout.log_prob_micro_batch_size_per_gpu": 4,
        f"{group}.actor.ppo_micro_batch_size_per_gpu": 4,
        f"{group}.actor.ppo_mini_batch_size": 4,
        f"{group}.actor.optim.lr": 1e-3,
        f"{group}.actor.optim.lr_decay_style": "linear",
        f"{group}.actor.optim.total_training_steps": 12,
        f"{group}.model.enable_gradient_checkpointing": False,
        **{f"+{group}.actor.megatron.override_transformer_config.{name}": value for name, value in OVERRIDES.items()},
    }
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_megatron_trainer", [*(f"{name}={value}" for name, value in given.items()), *overrides])
    if block is not None:
        with open_dict(config):
            config.mismatch = block
        prepare(config)
    return config


def worker(model: str, block: dict[str, Any] | None = None, *overrides: str) -> Any:
    """Return the worker of an actor: verl's own without a block, and ours with one."""
    from mismatch_ext.adapters.verl.worker import MismatchWorker
    from verl.workers.engine_workers import ActorRolloutRefWorker

    config = configured(model, block, *overrides)
    os.environ.pop("VERL_ENGINE_VENDOR", None)
    built = (ActorRolloutRefWorker if block is None else MismatchWorker)(config.actor_rollout_ref, "actor")
    built.init_model()
    return built


def batch(rollout: Tensor | None = None, seed: int = 0, **fields: Tensor) -> TensorDict:
    """Return a batch of four samples as verl's trainer hands it to a worker.

    Args:
        rollout: Routes that a rollout engine recorded of their tokens.
        seed: Seed of the tokens.
        fields: Further fields.
    """
    prompts, responses = [], []
    for number, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        generator = torch.Generator().manual_seed(len(PROMPTS) * seed + number)
        prompts.append(torch.randint(3, 16, (prompt,), generator=generator))
        responses.append(torch.randint(3, 16, (response,), generator=generator))
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
            "advantages": nested([torch.full((len(ids),), (-1.0) ** row) for row, ids in enumerate(responses)]),
            **fields,
        },
        batch_size=len(whole),
    )
    if rollout is not None:
        data["routed_experts"] = carrying(rollout, data["input_ids"])
    options = {"calculate_entropy": True, "global_token_num": TOKENS, "compute_loss": False}
    tu.assign_non_tensor(data, temperature=1.0, uid=["first", "second", "third", "fourth"], **options)
    return data


def scored(built: Any, data: TensorDict) -> TensorDict:
    """Run the pass that computes old log-probabilities, and add them to the batch, and routes if it returned any."""
    from verl.workers.utils.padding import response_from_nested

    output = built.compute_log_prob(data.clone())
    data = data.clone()
    data["old_log_probs"] = response_from_nested(output["log_probs"], data["response_mask"]).float()
    if "routed_experts" in output.keys():  # a TensorDict iterates over its rows
        data["routed_experts"] = output["routed_experts"]
    return data


def update(built: Any, data: TensorDict, size: int = 4) -> Any:
    """Run verl's update over a batch, in mini-batches of a size, and return its metrics."""
    data = data.clone()
    tu.assign_non_tensor(
        data, mini_batch_size=size, global_batch_size=size, epochs=1, seed=0, dataloader_kwargs={"shuffle": False}
    )
    return tu.get(built.update_actor(data), "metrics")


def rows(values: Tensor) -> list[list[float]]:
    """Return a ragged tensor's rows."""
    return [row.tolist() for row in values.unbind()]


def parameters(built: Any) -> str:
    """Return a digest of all weights, to the last bit."""
    digest = hashlib.sha256()
    for name, weight in sorted(built.actor.engine.module[0].named_parameters()):
        digest.update(name.encode() + weight.detach().float().numpy().tobytes())
    return digest.hexdigest()


def both(built: Any, data: TensorDict) -> dict[str, Any]:
    """Score a batch, learn from it, and return what came of both, and which experts the routers handed on."""
    with chosen(built.actor.engine.module[0]) as seen:
        data = scored(built, data)
        metrics = update(built, data)
    return {
        "logprobs": rows(data["old_log_probs"]),
        "grad_norm": float(metrics["grad_norm"][0]),
        "lr": metrics["lr"],
        "loss": metrics["loss"],
        "keys": sorted(metrics),
        "parameters": parameters(built),
        "seen": seen,
        "routes": data.get("routed_experts", None),
    }


def plain(ran: dict[str, Any]) -> dict[str, Any]:
    """Return what of a run can be compared and printed."""
    return {key: value for key, value in ran.items() if key not in ("seen", "routes")}


def obeyed(seen: dict[int, list[Tensor]], routes: Tensor, passes: int = 2) -> bool:
    """Tell whether every pass over the packed samples took the given routes, but for each sample's last token."""
    found = []
    for layer, calls in seen.items():
        assert len(calls) == passes, len(calls)
        for call in calls:
            for rows, given in zip(call.split(TOKENS), routes.unbind(), strict=True):
                ids = [row.nonzero().flatten().tolist() for row in rows[:-1]]
                found.append(ids == given[:-1, layer].sort(-1).values.tolist())
    return all(found) and len(found) == LAYERS * passes * len(TOKENS)


def stock(model: str) -> dict[str, Any]:
    """Run verl's worker, and ours with a block that only measures; compare with the checkpoint's own model."""
    found: dict[str, Any] = {}
    for name, block in (("verl", None), ("monitor", OFF)):
        built = worker(model, block)
        found[name] = {"class": type(built.actor.engine).__name__, **plain(both(built, batch()))}
        found[name]["dispatch"] = type(built.actor.engine.module[0]).__name__
    found["report"] = built.mismatch_report()
    return found


def float32(model: str, batches: int = 3) -> dict[str, Any]:
    """Compare the engine with transformers in float32: the routes that each takes by itself, then replays of both."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with engine_in_float32():
        built = worker(model, OFF, FLOAT32)
        own = [own_routes(built, reference, seed) for seed in range(batches)]
        found: dict[str, Any] = {"report": built.mismatch_report(), "own": own}
        recorded = as_rollout(nested([recorded_by(reference, ids)[0] for ids in batch()["input_ids"].unbind()]))
        for name, given in (("recorded", recorded), ("other", other(recorded))):
            built = worker(model, R3, FLOAT32)
            ran = both(built, batch(rollout=given))
            expected = [
                replayed_by(reference, *pair)
                for pair in zip(batch()["input_ids"].unbind(), given.unbind(), strict=True)
            ]
            expected = [logps[-count:].tolist() for logps, count in zip(expected, RESPONSES, strict=True)]
            found[name] = {"logprobs": ran["logprobs"], "expected": expected, "obeyed": obeyed(ran["seen"], given)}
    return found


def own_routes(built: Any, reference: Any, seed: int) -> dict[str, Any]:
    """Score a batch without replay, and count the (token, layer) pairs and those of which transformers takes other experts."""
    with chosen(built.actor.engine.module[0]) as seen:
        data = scored(built, batch(seed=seed))
    routes, logprobs = zip(*(recorded_by(reference, ids) for ids in data["input_ids"].unbind()), strict=True)
    wanted = torch.nn.functional.one_hot(torch.cat(routes), EXPERTS).sum(-2).bool()
    taken = torch.stack([torch.cat(seen[layer]) for layer in range(LAYERS)], 1)
    return {
        "pairs": wanted[..., 0].numel(),
        "differing": int((wanted != taken).any(-1).sum()),
        "logprobs": rows(data["old_log_probs"]),
        "expected": [logps[-count:].tolist() for logps, count in zip(logprobs, RESPONSES, strict=True)],
    }


def recorded_by(reference: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the routes `[T, L, K]` that transformers takes for a sample, and its tokens' log-probabilities `[T - 1]`."""
    from mismatch_ext.adapters.transformers.routing import record_routing

    with record_routing(reference) as recording:
        logps = logprobs_of(reference, ids)
    return recording.trace.experts.long(), logps


def replayed_by(reference: Any, ids: Tensor, routes: Tensor) -> Tensor:
    """Return a sample's log-probabilities `[T - 1]` in transformers under given routes; the last token's are its own."""
    from mismatch_ext.adapters.transformers.routing import moe_layout, replay_routing

    from mismatch_ext.routing import RoutingTrace, align

    layout = moe_layout(reference)
    trace = RoutingTrace.ingest(
        routes[:-1], num_experts=EXPERTS, layers=layout.layers, tokens=len(ids), version=0, request="0", top_k=TOP_K
    )
    with replay_routing(reference, *align([trace], torch.ones(1, len(ids))), others="replay"):
        return logprobs_of(reference, ids)


def logprobs_of(reference: Any, ids: Tensor) -> Tensor:
    """Return the log-probabilities of a sample's tokens but the first `[T - 1]`."""
    with torch.no_grad():
        logps = reference(ids[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
    return logps.gather(-1, ids[1:, None])[:, 0]


def replay(model: str) -> dict[str, Any]:
    """Record with R2, replay it, then replay the same and other routes with R3, and lose some of a sample."""
    found: dict[str, Any] = {"native": plain(both(worker(model), batch()))}
    built = worker(model, R2)
    ran = both(built, batch())
    found["R2"] = plain(ran)
    found["R2_report"] = built.mismatch_report()
    found["R2_lost"] = refused(update, built, scored(built, batch()).exclude("routed_experts"))
    routes = as_rollout(ran["routes"])
    for name, given in (("own", routes), ("other", other(routes))):
        built = worker(model, R3)
        ran = both(built, batch(rollout=given))
        found[name] = {**plain(ran), "obeyed": obeyed(ran["seen"], given), "own": obeyed(ran["seen"], routes)}
        found[name]["metrics"] = built.mismatch_metrics()
    found["report"] = built.mismatch_report()
    found["lost"] = {name: lost(built, routes, name) for name in ("sample", "tail", "all")}
    found["outside"] = {name: outside(built, routes, name) for name in ("range", "duplicate")}
    return found


def lost(built: Any, routes: Tensor, name: str) -> str:
    """Lose routes of the second sample, its last ones, or everybody's, before a scored batch."""
    given = [row.clone() for row in routes.unbind()]
    if name == "tail":
        given[1][-4:] = 0
    else:
        given[1].zero_()
    data = batch() if name == "all" else batch(rollout=nested(given))
    return refused(built.compute_log_prob, data)


def outside(built: Any, routes: Tensor, name: str) -> str:
    """Give the second sample's third token, in layer 1, what no top-k over the model's experts can choose, in an update."""
    given = [row.clone() for row in routes.unbind()]
    given[1][2, 1, 0] = EXPERTS if name == "range" else given[1][2, 1, 1]
    data = batch(rollout=nested(given))
    data["old_log_probs"] = nested([torch.full((count,), -3.0) for count in RESPONSES])
    before, found = parameters(built), refused(update, built, data)
    assert parameters(built) == before
    return found


def layouts(model: str, seed: int = 5) -> dict[str, Any]:
    """Replay random routes in micro-batches of several shapes, and with activations recomputed."""
    generator = torch.Generator().manual_seed(seed)
    given = as_rollout(
        nested([torch.rand(count, LAYERS, EXPERTS, generator=generator).topk(TOP_K).indices for count in TOKENS])
    )
    group, recompute = "actor_rollout_ref", "actor_rollout_ref.actor.megatron.override_transformer_config.recompute_"
    sizes = (f"{group}.rollout.log_prob_micro_batch_size_per_gpu", f"{group}.actor.ppo_micro_batch_size_per_gpu")
    found: dict[str, Any] = {}
    for name, overrides in {
        "whole": (),
        "one_by_one": tuple(f"{size}=1" for size in sizes),
        "recomputed": (f"{recompute}granularity=full", f"{recompute}method=uniform", f"{recompute}num_layers=1"),
    }.items():
        built = worker(model, R3, *overrides)
        ran = both(built, batch(rollout=given))
        found[name] = {**plain(ran), "calls": len(ran["seen"][0])}
        if name in ("whole", "recomputed"):
            found[name]["obeyed"] = obeyed(ran["seen"], given, len(ran["seen"][0]))
    return found


def rates(model: str, out: str) -> dict[str, Any]:
    """Lead the rate of two schedules over six updates, and go on with the last three in a new worker."""
    found: dict[str, Any] = {"constant": rates_of(worker(model, LED, *CONSTANT), 2)}
    built = worker(model, LED, *COSINE)
    found["cosine"] = rates_of(built, save=out)
    found["metrics"] = built.mismatch_metrics()
    resumed = worker(model, LED, *COSINE)
    resumed.load_checkpoint(out)
    found["resumed"] = rates_of(resumed, first=3)
    other = worker(model, {"lr": {"trigger": "grad_norm"}, **OFF}, *COSINE)
    found["other_trigger"] = refused(other.load_checkpoint, out)
    return found


def rates_of(built: Any, size: int = 4, *, first: int = 0, save: str | None = None) -> dict[str, Any]:
    """Return the rates that the updates up to the sixth step with, and those that verl logs."""
    [inner] = [part.optimizer for part in built.actor.engine.optimizer.chained_optimizers]
    seen: list[float] = []
    inner.register_step_pre_hook(lambda optimizer, *_: seen.extend(group["lr"] for group in optimizer.param_groups))
    old, logged = nested([torch.full((count,), -3.0) for count in RESPONSES]), []
    data = batch(old_log_probs=old)  # the same before and after a checkpoint
    for number in range(first, 6):
        logged.append(update(built, data, size)["lr"])
        if save is not None and number == 2:
            built.save_checkpoint(save)
    return {"seen": seen, "logged": logged}


def surge(model: str) -> dict[str, Any]:
    """Lead the rate by statistics of the driver, which may be missing; refuse optimizers that cannot be led."""
    section = {"warmup_steps": 0, "floor": 0.5, "baseline_window": 1}
    built = worker(model, {"lr": section, **OFF}, *CONSTANT)
    data, found = scored(built, batch()), {}
    found["without"] = refused(update, built, data)
    found["answers"], found["logged"] = [], []
    for length in (10.0, 30.0, 30.0, 30.0):
        found["answers"].append(built.mismatch_update_lr(response_length=length))
        found["logged"] += update(built, data)["lr"]
    found["again"] = refused(update, built, data)
    found["refused"] = unsteered(worker(model, OFF).actor.engine.optimizer)
    return found


def unsteered(optimizer: Any) -> dict[str, str]:
    """Return what is said of optimizers whose rate cannot be led."""
    from mismatch_ext.adapters.verl.megatron import torch_optimizers

    [part] = optimizer.chained_optimizers
    inner, found = part.optimizer, {}
    part.config.use_precision_aware_optimizer = True
    found["precision_aware"] = refused(torch_optimizers, optimizer)
    part.config.use_precision_aware_optimizer = False
    part.optimizer = part
    found["not_torchs"] = refused(torch_optimizers, optimizer)
    part.optimizer = inner
    found["accepted"] = refused(torch_optimizers, optimizer)
    return found


def several(scenarios: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Run scenarios one after the other in this process: most of the time of each would go into imports."""
    logging.getLogger("megatron").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    with megatron_on_cpu():
        found = {name: globals()[name](**payload) for name, payload in scenarios.items()}
        stubs = [name for name in ("transformer_engine", "triton") if name in sys.modules]
    return {**found, "stubs_called": CALLED, "stubs_left": stubs}
