"""Runs of the real TRL on two ranks over gloo, in forks or by `accelerate launch ... --module MODULE NAME '{json}'`.

A scenario runs on every rank, and each rank checks what it and the other one have found. Ranks that have lost each other print
where they stand and give up after `limit` seconds.
"""

from __future__ import annotations

import faulthandler
import hashlib
import importlib
import json
import math
import os
import statistics
import sys
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, gather_object
from mismatch_ext.adapters.trl import MismatchGRPOConfig, MismatchGRPOTrainer, objective
from mismatch_ext.adapters.trl import trainer as trl_trainer
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from mismatch_ext.errors import ConfigError
from mismatch_ext.kl import kl_sums
from tests.peers.forks import on_ranks
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


def both(value: Any) -> list[Any]:
    """Return a value of each rank."""
    found: list[Any] = gather_object([value])
    return found


def series(run: dict[str, Any], name: str) -> list[float]:
    """Return a metric of each step."""
    return [entry[name] for entry in run["logged"]]


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
        mine = trainer.mm.routing._agreement.get(split)  # none when training ends
        heard["agreement"].append(0 if mine is None else int(mine["tokens"]))
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


def expect_unions(run: dict[str, Any], heard: dict[str, list[Any]]) -> None:
    """Check that gap and agreement of each step are those of both ranks' tokens."""
    for step, entry in enumerate(run["logged"]):
        (tokens, total, largest), (others, other_total, other_largest) = both(heard["gap"][step])
        assert entry["mismatch/tokens"] == tokens + others
        union = (total + other_total) / (tokens + others)
        assert entry["mismatch/logp_abs_diff_mean"] == pytest.approx(union, rel=1e-6)
        assert entry["mismatch/logp_abs_diff_max"] == pytest.approx(max(largest, other_largest), rel=1e-6)
        compared = both(heard["agreement"][step])
        assert entry["mismatch/routing/compared_tokens"] == sum(compared) > max(compared)


def outcome(trainer: Any, resume: str | None = None) -> dict[str, Any]:
    """Train, check that both ranks logged the same numbers and ended with the same weights, and return these."""
    trainer.train(resume_from_checkpoint=resume)
    kind = DistributedType.FSDP if SHARDED else DistributedType.MULTI_CPU
    assert (trainer.accelerator.distributed_type, trainer.accelerator.num_processes) == (kind, 2)
    sharded = [isinstance(parameter, DTensor) for parameter in trainer.model.parameters()]
    assert all(sharded) if SHARDED else not any(sharded)
    found = {"parameters": digest_of(trainer.model), "logged": logged(trainer)}
    first, second = both(found)
    assert first == second and first["logged"]
    return found


def replay(model: str, out: str) -> None:
    """Replay the model's own routes, which changes no bit, where one rank's responses are much shorter than the other's.

    Sharded, it goes on running the model until the other rank has finished: those passes are no tokens of its own.
    """
    found = []
    for block in (None, {"routing": R2}):
        folder = f"{out}/{'stock' if block is None else 'R2'}"
        trainer = build(model, folder, block, gradient_accumulation_steps=2, per_device_train_batch_size=4)
        trainer.generation_config.max_new_tokens = 4 if trainer.accelerator.process_index == 0 else 16
        found.append(outcome(trainer))
    stock, replayed = found
    assert replayed["parameters"] == stock["parameters"]
    for name in ("loss", "grad_norm"):
        assert series(replayed, name) == series(stock, name), name
    assert series(replayed, "mismatch/routing/set_mismatch_frac") == [0.0] * 3
    # Each rank replays every micro-batch of its own.
    assert forwards(trainer) == 6


def metrics(model: str, out: str) -> None:
    """Train with a KL term whose coefficient adapts: the KL is that of both ranks' tokens."""
    trainer = build(model, out, {"routing": R2, "kl": {"coef": 0.05, "target_kl": 1e-3}})
    heard = listen(trainer)
    found = outcome(trainer)
    # A measurement for the controller, which has the old log-probabilities, and one for the log.
    assert len(heard["kl"]) == 6
    for step, entry in enumerate(found["logged"]):
        (tokens, total), (others, other_total) = both(heard["kl"][2 * step + 1])
        union = (total + other_total) / (tokens + others)
        assert entry["mismatch/kl_ref_k1"] == pytest.approx(union, rel=1e-5, abs=1e-9)
        assert not step or abs(total / tokens - other_total / others) > 1e-4
    # By hand: errors are clipped to 0.2 either way, the gains are 0.1 on the error and 0.05 on its sum. The first KL is 0, the
    # second far above the target.
    wanted = [0.05, 0.05 * math.exp(0.1 * -0.2 + 0.05 * -0.2), 0.05 * math.exp(0.1 * 0.2)]
    assert series(found, "mismatch/kl_coef") == pytest.approx(wanted, rel=1e-12)


def resumed(model: str, out: str) -> None:
    """Train three steps with a checkpoint after the second, and take the third again from there."""
    block = {"routing": R2, "kl": {"coef": 0.05, "target_kl": 1e-3}}
    found = []
    for resume in (None, f"{out}/checkpoint-2"):
        trainer = build(model, out, block, save_strategy="steps", save_steps=2)
        keep_names(trainer)
        found.append(outcome(trainer, resume))
    first, again = found
    assert again["logged"][-1] == first["logged"][-1] and again["parameters"] == first["parameters"]
    # The controller's state was not the one that a run starts from.
    assert series(first, "mismatch/kl_coef")[2] != 0.05


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


def rate(dense: str, out: str) -> None:
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
    found = outcome(trainer)
    for step, entry in enumerate(found["logged"]):
        mine, others = both(heard["lengths"][step])
        assert entry["completions/mean_length"] == statistics.mean(mine + others)
    # A surge is twice the first two lengths: at step 3, and the period is round(1.8 * 3). Rank 1 alone would have it at step 2,
    # rank 0 never.
    assert series(found, "mismatch/lr_multiplier") == [1.0, 1.0, 1.0, 1.0, 1.0, 0.5]
    # Two steps of warm-up, then half a cosine over four: cos(pi/4) and cos(3 pi/4) at the fourth and sixth.
    schedule = [0.0, 5e-4, 1e-3, 8.535533905932737e-4, 5e-4, 1.4644660940672628e-4]
    assert grow.rates == pytest.approx([*schedule[:5], 0.5 * schedule[5]], rel=1e-12)
    assert series(found, "learning_rate") == grow.rates


def stopped(dense: str, out: str) -> None:
    """Let an alarm stop training after the second step."""
    alarms = {"kl_coef": {"above": 0.01, "patience": 2, "action": "stop"}}
    block = {"kl": {"coef": 0.05}, "monitor": {"alarms": alarms}}
    trainer = build(dense, out, block, max_steps=4, model_init_kwargs=None)
    outcome(trainer)
    assert trainer.state.global_step == 2 and "checkpoint-2" in os.listdir(out)


def refused(dense: str, out: str) -> None:
    """Refuse what several ranks, or shards, do not allow, before an engine is started."""
    blocks: dict[str, Any] = {"mismatch.correction.normalize: ": {"correction": {"preset": "slime_mis"}}}
    of_shards = "a reference model with FSDP2 and fsdp_cpu_ram_efficient_loading=true"
    if SHARDED:
        blocks[of_shards] = {"kl": {"coef": 0.1}}
    for words, block in blocks.items():
        variables = {"FSDP_CPU_RAM_EFFICIENT_LOADING": str(words == of_shards).lower()}
        started = mock.patch("vllm.LLM.__init__", side_effect=AssertionError("an engine was started"))
        with mock.patch.dict(os.environ, variables), started, pytest.raises(ConfigError, match=f"^{words}"):
            build(dense, out, block, model_init_kwargs=None, use_vllm=True)


def transformers(model: str, dense: str, out: str) -> None:
    """Run all that generates by transformers and goes through: starting the processes takes longer than each of it."""
    replay(model, f"{out}/replay")
    metrics(model, f"{out}/metrics")
    resumed(model, f"{out}/resumed")
    rate(dense, f"{out}/rate")
    stopped(dense, f"{out}/stopped")
    refused(dense, f"{out}/refused")


def one_fails(model: str, out: str) -> None:
    """Let one rank lose the routes of its rows after they were sampled."""
    trainer = build(model, out, {"routing": R2})
    plain = trainer.compute_loss

    def compute_loss(model: Any, inputs: Any, **kwargs: Any) -> Any:
        if trainer.accelerator.process_index == 1 and trainer.state.global_step == 1:
            routes_of(trainer).clear()
        return plain(model, inputs, **kwargs)

    trainer.compute_loss = compute_loss
    outcome(trainer)


def alone(dense: str, out: str) -> None:
    """Let a rank log by itself, a loss too."""
    trainer = build(dense, out, {"lr": {}}, model_init_kwargs=None)
    trainer.model.train()
    trainer.mm.log.begin(None)
    for step in (1.0, 2.0):
        if trainer.accelerator.is_main_process:
            trainer.log({"mine": step})
            trainer.log({"loss": step})
        trainer.log({"loss": step, "learning_rate": 0.1})
    mine = [entry["mine"] for entry in trainer.state.log_history if "mine" in entry]
    assert mine == ([1.0, 2.0] if trainer.accelerator.is_main_process else [])


def engines(model: str, out: str) -> None:
    """Train with an engine per rank, whose routes are replayed; sharded in float16, where one shard overflows."""
    dtype = "float16" if SHARDED else "float32"
    scale = {"init_scale": 256.0} if SHARDED else {}
    block = {"precision": {"dtype": dtype, **scale}, "routing": R3, "kl": {"coef": 0.05}}
    trainer = build(model, out, block, use_vllm=True, bf16=None)
    heard, scales = listen(trainer), list[Any]()
    if SHARDED:
        overflow_on_one(trainer, scales)
    found = outcome(trainer)
    expect_unions(found, heard)
    # Both engines hold the present weights: stale ones are a thousand times further off (0.05 in float16).
    assert max(series(found, "mismatch/logp_abs_diff_mean")) < (1e-2 if SHARDED else 1e-5)
    # Sharded, the last update comes after a step that an overflow has stopped.
    assert trainer.mm.verdict.status == ("unchanged" if SHARDED else "in_sync")
    assert trainer.mm.checked.weight_version == 3 and forwards(trainer) == 6
    if SHARDED:
        (scale_at_first, before), (after_first, moved), (after_second, kept) = scales
        assert [scale_at_first, after_first, after_second] == [256.0, 256.0, 128.0]
        assert moved != before and kept == moved != found["parameters"]
        assert series(found, "mismatch/overflow_steps") == [0.0, 1.0, 1.0]
        # In the same processes: starting them takes longer than these two steps.
        masked(model, f"{out}/masked")


def masked(model: str, out: str) -> None:
    """Train with an engine per rank whose sampling masks are replayed, where the output projection is sharded."""
    block = {"precision": {"dtype": "float32"}, "sampling_mask": {}, "routing": R3, "kl": {"coef": 0.05}}
    found = outcome(build(model, out, block, use_vllm=True, bf16=False, top_p=0.9, top_k=8, max_steps=2))
    # Over the whole vocabulary the mass that truncation cuts off would stand in it: 0.02 and more.
    assert max(series(found, "mismatch/logp_abs_diff_mean")) < 1e-5
    assert all(1 < size <= 8 for size in series(found, "mismatch/sampling_mask_size"))
    assert series(found, "mismatch/routing/set_mismatch_frac") == [0.0] * 2


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


def on_two(module: str, name: str, limit: int, **payload: Any) -> None:
    """Run a scenario of a module on two forks of this process."""
    os.environ["ACCELERATE_USE_CPU"] = "true"
    scenario = getattr(importlib.import_module(module), name)
    on_ranks(_on_rank, 2, limit + 30, scenario=scenario, seconds=limit, given=payload)


def _on_rank(scenario: Callable[..., None], seconds: int, given: dict[str, Any]) -> None:
    faulthandler.dump_traceback_later(seconds, exit=True)
    name_cpu()
    if SHARDED:
        shard_on_cpu()
    scenario(**given)
    dist.barrier()


def main(scenarios: Mapping[str, Any]) -> None:
    """Run the scenario of a module that is named on the command line."""
    name, payload = sys.argv[1], json.loads(sys.argv[2])
    _on_rank(scenarios[name], payload.pop("limit"), payload)
    # vLLM's and torch's own threads may outlive main; nothing is left to save.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(globals())
