"""Runs of the real TRL on two ranks over gloo: `accelerate launch ... --module tests.peers.trl.scenarios_ranks NAME '{json}'`.

A scenario runs on every rank; what the ranks return is gathered, and rank 0 writes the list to the payload's file `result`.
Ranks that have lost each other print where they stand and give up after `limit` seconds.
"""

from __future__ import annotations

import faulthandler
import functools
import hashlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, gather_object
from mismatch_ext.adapters.trl import MismatchGRPOConfig, MismatchGRPOTrainer, objective
from mismatch_ext.adapters.trl import trainer as trl_trainer
from mismatch_ext.adapters.trl.rows import row_keys, rows_of_batch
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from mismatch_ext.kl import kl_sums
from tests.peers.trl.scenarios_routing import routes_of
from tests.peers.trl.scenarios_training import arguments, forwards, graded, keep_names, rows

R3, R2 = {"mode": "R3", "measured": 1.0}, {"mode": "R2", "measured": 1.0}
# Grouped products of experts do not come out the same in every process.
EAGER = {"experts_implementation": "eager"}
SHARDED = "ACCELERATE_USE_FSDP" in os.environ
TIMES = ("step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second")


def shard_on_cpu() -> None:
    """Let accelerate shard models on a CPU: it has all that it takes, and reserves it for accelerators."""
    plain = AcceleratorState.__init__

    def __init__(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        plain(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = __init__  # type: ignore[method-assign]


def name_cpu() -> None:
    """Let accelerate call its device `cpu`: it says `cpu:0` on several ranks, where torch does not load checkpoints to."""
    plain = PartialState.set_device

    def set_device(self: Any) -> None:
        plain(self)
        self.device = torch.device(self.device.type)

    PartialState.set_device = set_device  # type: ignore[method-assign]


def build(model: str, out: str, block: Any, **overrides: Any) -> Any:
    """Build a trainer that generates by transformers in float32; without a block it is TRL's own."""
    given = {"use_vllm": False, "bf16": False, "router_aux_loss_coef": 0.0, "model_init_kwargs": EAGER, **overrides}
    if block is None:
        return GRPOTrainer(
            model=model, reward_funcs=graded, args=GRPOConfig(**arguments(out, **given)), train_dataset=rows()
        )
    config = MismatchGRPOConfig(**arguments(out, mismatch=block, **given))
    return MismatchGRPOTrainer(
        model=model, reward_funcs=graded, args=config, train_dataset=rows(), eval_dataset=rows(1)
    )


def digest_of(model: torch.nn.Module) -> str:
    """Return a digest of all parameters, those of shards put together again."""
    sha = hashlib.sha256()
    for name, parameter in sorted(model.state_dict().items()):
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        sha.update(name.encode() + whole.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def logged(trainer: Any) -> list[dict[str, float]]:
    """Return what this rank logged at each step, times left out."""
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [{name: value for name, value in entry.items() if name not in TIMES} for entry in entries]


def listen(trainer: Any) -> dict[str, list[Any]]:
    """Return lists that fill with what this rank alone measures, before anything is merged over ranks."""
    heard: dict[str, list[Any]] = {"gap": [], "agreement": [], "kl": [], "lengths": []}

    def spy(owner: Any, name: str, hear: Callable[..., None]) -> None:
        plain = getattr(owner, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            result = plain(*args, **kwargs)
            hear(result, *args, **kwargs)
            return result

        setattr(owner, name, called)

    def gap(_: Any, split: str, *, old: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor, **kwargs: Any) -> None:
        difference = (old - rollout)[mask].double()
        if not kwargs.get("native"):
            heard["gap"].append([int(mask.sum()), float(difference.abs().sum()), float(difference.abs().max())])

    def agreement(split: str, ranks: Any) -> Any:
        mine = trainer.mm.routing._agreement.get(split)
        heard["agreement"].append(None if mine is None else {name: value.tolist() for name, value in mine.items()})
        return merged(split, ranks)

    def kl(_: Any, *, logprobs: torch.Tensor, ref_logprobs: torch.Tensor, mask: torch.Tensor) -> None:
        log_ratio = (logprobs - ref_logprobs)[mask.bool()].detach().double()
        heard["kl"].append([int(mask.sum()), float(log_ratio.sum())])

    def lengths(result: Any, *args: Any) -> None:
        heard["lengths"].append(result["completion_mask"].sum(1).tolist())

    spy(trainer.mm.log.sums, "add_gap", gap)
    spy(trainer, "_generate_and_score_completions", lengths)
    if trainer.mm.routing is not None:
        merged = trainer.mm.routing.take_agreement
        trainer.mm.routing.take_agreement = agreement
    for module in (objective, trl_trainer):
        module.kl_sums = kl_sums  # so that only the last listener hears
        if trainer.mm.kl is not None:
            spy(module, "kl_sums", kl)
    return heard


def outcome(trainer: Any, **extra: Any) -> dict[str, Any]:
    """Train, and return what tests compare."""
    trainer.train()
    sharded = sum(isinstance(parameter, DTensor) for parameter in trainer.model.parameters())
    return {
        "kind": str(trainer.accelerator.distributed_type),
        "processes": trainer.accelerator.num_processes,
        "sharded": sharded / len(list(trainer.model.parameters())),
        "parameters": digest_of(trainer.model),
        "logged": logged(trainer),
        "forwards": forwards(trainer),
        **extra,
    }


def give_others_routes(trainer: Any) -> list[int]:
    """Let each rank train on the other rank's routes wherever they are as long as its own, and count them."""
    plain, exchanged = trainer.compute_loss, []

    def compute_loss(model: Any, inputs: Any, **kwargs: Any) -> Any:
        known = routes_of(trainer)
        keys = row_keys(*rows_of_batch(inputs))
        mine = [known[key] for key in keys]
        theirs: list[Any] = [None, None]
        dist.all_gather_object(theirs, mine)
        others = theirs[1 - dist.get_rank()]
        given = [next((other for other in others if other.rows == trace.rows), trace) for trace in mine]
        exchanged.append(sum(new is not old for new, old in zip(given, mine, strict=True)))
        # Under this rank's ids: with their own they would be refused.
        known |= {key: replace(old, parts=new.parts) for key, new, old in zip(keys, given, mine, strict=True)}
        return plain(model, inputs, **kwargs)

    trainer.compute_loss = compute_loss
    return exchanged


def replay(model: str, out: str) -> dict[str, Any]:
    """Train without a block and with routing; then with routes of the other rank."""
    found: dict[str, Any] = {}
    settings: dict[str, dict[str, Any]] = {
        "plain": {},
        "accumulation": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4},
    }
    for name, given in settings.items():
        for kind, routing in (("stock", None), ("R2", R2)):
            block = None if routing is None else {"routing": routing}
            found[f"{name} {kind}"] = outcome(build(model, f"{out}/{name}-{kind}", block, **given))
    trainer = build(model, f"{out}/others", {"routing": R2})
    exchanged, heard = give_others_routes(trainer), listen(trainer)
    found["others"] = outcome(trainer, exchanged=exchanged, heard=heard)
    return found


def metrics(model: str, out: str) -> dict[str, Any]:
    """Train with routing and a KL term whose coefficient adapts, listen to what each rank measures, and evaluate."""
    block = {"routing": R2, "kl": {"coef": 0.05, "target_kl": 1e-3}}
    trainer = build(model, out, block, per_device_eval_batch_size=8)
    heard = listen(trainer)
    result = outcome(trainer)
    result["heard"] = {name: list(values) for name, values in heard.items()}
    heard["agreement"].clear()
    trainer.evaluate()
    last = trainer.state.log_history[-1]
    evaluated = {name: value for name, value in last.items() if "mismatch/" in name or name == "eval_loss"}
    return {**result, "evaluated": evaluated, "own": heard["agreement"]}


def uneven(model: str, out: str) -> dict[str, Any]:
    """Train with routing where one rank's responses are much shorter than the other's."""
    found = {}
    for kind, block in (("stock", None), ("R2", {"routing": R2})):
        trainer = build(model, f"{out}/{kind}", block)
        trainer.generation_config.max_new_tokens = 4 if trainer.accelerator.process_index == 0 else 16
        found[kind] = outcome(trainer)
    return found


def resumed(model: str, dense: str, out: str) -> dict[str, Any]:
    """Train three steps with a checkpoint after the second, and take the third again from there."""
    found = {}
    blocks = {
        "routing": (model, {"routing": R2}),
        "kl": (dense, {"kl": {"coef": 0.05, "target_kl": 1e-3}}),
    }
    for name, (path, block) in blocks.items():
        given = {"save_strategy": "steps", "save_steps": 2, **({"model_init_kwargs": None} if path == dense else {})}
        checkpoint = f"{out}/{name}/checkpoint-2"
        trainer = build(path, f"{out}/{name}", block, **given)
        keep_names(trainer)
        found[f"{name} first"] = outcome(trainer)
        trainer = build(path, f"{out}/{name}", block, **given)
        trainer.train = functools.partial(trainer.train, resume_from_checkpoint=checkpoint)
        found[f"{name} resumed"] = outcome(trainer)
    return found


class Grow(TrainerCallback):
    """Lets one rank's responses grow, and notes the rate in the optimizer while it steps."""

    def __init__(self, limits: list[list[int]]) -> None:
        self.limits = limits
        self.trainer: Any = None
        self.rates: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """Read the rate after every other hook that sets it."""
        inner = optimizer.optimizer
        inner.register_step_pre_hook(lambda opt, *_: self.rates.append(float(opt.param_groups[0]["lr"])))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Set the longest response of this rank."""
        limit = self.limits[self.trainer.accelerator.process_index][state.global_step]
        # A random model may end a response early, and its length is what is asked for here.
        self.trainer.generation_config.min_new_tokens = self.trainer.generation_config.max_new_tokens = limit


def rate(dense: str, out: str) -> dict[str, Any]:
    """Control the rate while responses grow on rank 1 alone, at first by too little for a surge of the mean."""
    block = {"lr": {"baseline_window": 2, "warmup_steps": 0}, "kl": {"coef": 0.01}}
    trainer = build(
        dense, out, block, max_steps=6, lr_scheduler_type="cosine", warmup_steps=2, model_init_kwargs=None,
        per_device_train_batch_size=4,
    )  # fmt: skip
    grow = Grow([[4] * 6, [4, 4, 8, 16, 16, 16]])
    grow.trainer = trainer
    trainer.add_callback(grow)
    heard = listen(trainer)
    return outcome(trainer, heard=heard, rates=grow.rates)


def stopped(dense: str, out: str) -> dict[str, Any]:
    """Let an alarm stop training after the second step."""
    alarms = {"kl_coef": {"above": 0.01, "patience": 2, "action": "stop"}}
    block = {"kl": {"coef": 0.05}, "monitor": {"alarms": alarms}}
    trainer = build(dense, out, block, max_steps=4, model_init_kwargs=None)
    result = outcome(trainer)
    return {**result, "step": trainer.state.global_step, "saved": sorted(os.listdir(out))}


def refused(dense: str, out: str) -> dict[str, str]:
    """Return how what several ranks, or shards, do not allow is refused; an engine that would be started fails."""
    found = {}
    blocks: dict[str, Any] = {"normalize": {"correction": {"preset": "slime_mis"}}}
    if SHARDED:
        blocks["reference"] = {"kl": {"coef": 0.1}}
    for name, block in blocks.items():
        variables = {"FSDP_CPU_RAM_EFFICIENT_LOADING": str(name == "reference").lower()}
        started = mock.patch("vllm.LLM.__init__", side_effect=AssertionError("an engine was started"))
        with mock.patch.dict(os.environ, variables), started:
            try:
                build(dense, f"{out}/{name}", block, model_init_kwargs=None, use_vllm=True)
            except Exception as error:  # noqa: BLE001 - what is raised is the result
                found[name] = f"{type(error).__name__}: {error}"
    return found


def transformers(model: str, dense: str, out: str) -> dict[str, Any]:
    """Run all that generates by transformers and goes through: starting the processes takes longer than each of it."""
    return {
        "replay": replay(model, f"{out}/replay"),
        "metrics": metrics(model, f"{out}/metrics"),
        "uneven": uneven(model, f"{out}/uneven"),
        "resumed": resumed(model, dense, f"{out}/resumed"),
        "rate": rate(dense, f"{out}/rate"),
        "stopped": stopped(dense, f"{out}/stopped"),
        "refused": refused(dense, f"{out}/refused"),
    }


def one_fails(model: str, out: str) -> dict[str, Any]:
    """Let one rank lose the routes of its rows after they were sampled."""
    trainer = build(model, out, {"routing": R2})
    plain = trainer.compute_loss

    def compute_loss(model: Any, inputs: Any, **kwargs: Any) -> Any:
        if trainer.accelerator.process_index == 1 and trainer.state.global_step == 1:
            routes_of(trainer).clear()
        return plain(model, inputs, **kwargs)

    trainer.compute_loss = compute_loss
    return outcome(trainer)


def alone(dense: str, out: str) -> dict[str, Any]:
    """Let a rank log by itself, a loss too."""
    trainer = build(dense, out, {"lr": {}}, model_init_kwargs=None)
    trainer.model.train()
    trainer.mm.log.begin(None)
    for step in (1.0, 2.0):
        if trainer.accelerator.is_main_process:
            trainer.log({"mine": step})
            trainer.log({"loss": step})
        trainer.log({"loss": step, "learning_rate": 0.1})
    logged = [entry["mine"] for entry in trainer.state.log_history if "mine" in entry]
    return {"logged": logged}


def engines(model: str, out: str) -> dict[str, Any]:
    """Train with an engine per rank, whose routes are replayed; sharded in float16, where one shard overflows."""
    dtype = "float16" if SHARDED else "float32"
    block = {
        "precision": {"dtype": dtype, **({"init_scale": 256.0} if dtype == "float16" else {})},
        "routing": R3,
        "kl": {"coef": 0.05},
    }
    trainer = build(model, out, block, use_vllm=True, bf16=None)
    heard, scales = listen(trainer), []
    if dtype == "float16":
        overflow_on_one(trainer, scales)
    result = outcome(trainer, heard=heard, scales=scales)
    verdict = None if trainer.mm.verdict is None else trainer.mm.verdict.status
    version = trainer.mm.checked.weight_version
    # In the same processes: starting them takes longer than these two steps.
    masks = masked(model, f"{out}/masked") if SHARDED else None
    return {**result, "verdict": verdict, "weight_version": version, "masked": masks}


def masked(model: str, out: str) -> dict[str, Any]:
    """Train with an engine per rank whose sampling masks are replayed, where the output projection is sharded."""
    block = {"precision": {"dtype": "float32"}, "sampling_mask": {}, "routing": R3, "kl": {"coef": 0.05}}
    trainer = build(model, out, block, use_vllm=True, bf16=False, top_p=0.9, top_k=8, max_steps=2)
    return outcome(trainer)


def overflow_on_one(trainer: Any, scales: list[Any]) -> None:
    """Let a gradient of the second step overflow in rank 1's shard alone, and note scale and weights after each step."""
    plain = trainer.training_step

    def training_step(*args: Any, **kwargs: Any) -> Any:
        scales.append([trainer.accelerator.scaler.get_scale(), digest_of(trainer.model)])
        loss = plain(*args, **kwargs)
        if len(scales) == 2 and trainer.accelerator.process_index == 1:
            gradient = next(p.grad for p in trainer.model.parameters() if p.grad is not None)
            (gradient.to_local() if isinstance(gradient, DTensor) else gradient).view(-1)[0] = torch.inf
        return loss

    trainer.training_step = training_step


def main(scenarios: Mapping[str, Any]) -> None:
    """Run the scenario of a module that is named on the command line."""
    name, payload = sys.argv[1], json.loads(sys.argv[2])
    faulthandler.dump_traceback_later(payload.pop("limit"), exit=True)
    name_cpu()
    if SHARDED:
        shard_on_cpu()
    result = Path(payload.pop("result"))
    found = gather_object([scenarios[name](**payload)])
    if dist.get_rank() == 0:
        result.write_text(json.dumps(found, default=str), encoding="utf-8")
    dist.barrier()
    # vLLM's and torch's own threads may outlive main; nothing is left to save.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(globals())
