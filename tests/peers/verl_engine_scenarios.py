"""verl's real FSDP2 engine in one process, without Ray or vLLM: `python -m tests.peers.verl_engine_scenarios NAME '{json}'`.

A scenario on several ranks starts this module once per rank; rank 0's result is the scenario's.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ.update(VERL_PLATFORM="cpu", VERL_ENGINE_DEVICE="cuda", VERL_LOGGING_LEVEL="ERROR")
os.environ.update(VERL_USE_EXTERNAL_MODULES="tests.peers.verl_cpu.platform")
# verl's own scaler stays disabled on a CPU, so that ours must do without a repair of it.
os.environ.setdefault("VERL_CPU_STOCK_SCALER", "1")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("RANK", "0")
os.environ.setdefault("LOCAL_WORLD_SIZE", "1")
os.environ.setdefault("LOCAL_RANK", "0")

import torch
from mismatch_ext.adapters.transformers.routing import moe_layout
from mismatch_ext.adapters.verl.block import BLOCK_VARIABLE, encode
from mismatch_ext.adapters.verl.engine import register_engine
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.tensor import DTensor
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import (
    FSDPActorConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import response_from_nested

from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import MismatchError

torch.set_num_threads(1)
register_engine()

SHORT = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
R3 = {"mode": "R3", "agreement_rate": 1.0}
R2 = {"mode": "R2", "agreement_rate": 1.0}
PROMPTS, RESPONSES = (6, 5, 4, 6), (8, 7, 6, 3)


@contextlib.contextmanager
def environment(**values: str | None) -> Iterator[None]:
    """Set variables for the time of a block; None removes one."""
    before = {name: os.environ.get(name) for name in values}
    for name, value in values.items():
        os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)


def worker(
    model: str,
    block: dict[str, Any] | None = None,
    *,
    dtype: str = "float32",
    vendor: str | None = "mismatch",
    micro_batch: int = 4,
    tokens: int | None = None,
    engine: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
    **model_options: Any,
) -> Any:
    """Return verl's real worker around its real engine; the block comes in as it does in a run, by the environment.

    Args:
        model: Folder of the checkpoint.
        block: The `mismatch` block.
        dtype: Compute dtype, by verl's own setting.
        vendor: Vendor of the engine; None takes verl's own.
        micro_batch: Samples per forward pass.
        tokens: Tokens per forward pass, for dynamic micro-batches.
        engine, optimizer, model_options: Further settings of verl.
    """
    config = HFModelConfig(
        path=model,
        **{
            "use_remove_padding": False,
            "enable_gradient_checkpointing": False,
            "override_config": {"attn_implementation": "sdpa"},
            **model_options,
        },
    )
    settings = {
        "strategy": "fsdp2",
        "mixed_precision": {"param_dtype": SHORT[dtype], "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        "use_dynamic_bsz": tokens is not None,
        "micro_batch_size_per_gpu": micro_batch,
        "infer_micro_batch_size_per_gpu": micro_batch,
        "max_token_len_per_gpu": tokens,
        "infer_max_token_len_per_gpu": tokens,
        "use_torch_compile": False,
        **(engine or {}),
    }
    parsed = MismatchConfig.parse(block)
    text = None if parsed is None else encode(parsed)
    torch.manual_seed(0)
    with environment(**{BLOCK_VARIABLE: text, "VERL_ENGINE_VENDOR": vendor}):
        built = TrainingWorker(
            TrainingWorkerConfig(
                model_type="language_model",
                model_config=config,
                engine_config=FSDPEngineConfig(**settings),
                optimizer_config=FSDPOptimizerConfig(**{"lr": 1e-3, "total_training_steps": 12, **(optimizer or {})}),
                checkpoint_config=CheckpointConfig(),
            )
        )
        built.reset()
    actor = FSDPActorConfig(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=micro_batch)
    built.set_loss_fn(partial(ppo_loss, config=actor))
    return built


def nested(parts: Sequence[Tensor]) -> Tensor:
    """Return a tensor of ragged rows."""
    return torch.nested.as_nested_tensor(list(parts), layout=torch.jagged)


def batch(samples: Sequence[int] = (0, 1, 2, 3), **fields: Tensor) -> TensorDict:
    """Return a batch as verl's trainer hands it to a worker; a sample has the same tokens in every batch.

    Args:
        samples: Numbers of the samples.
        fields: Further fields.
    """
    prompts, responses = [], []
    for number in samples:
        generator = torch.Generator().manual_seed(number)
        prompts.append(torch.randint(3, 16, (PROMPTS[number % 4],), generator=generator))
        responses.append(torch.randint(3, 16, (RESPONSES[number % 4],), generator=generator))
    whole = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
    data = TensorDict(
        {
            "prompts": nested(prompts),
            "responses": nested(responses),
            "input_ids": nested(whole),
            "position_ids": nested([torch.arange(len(ids)) for ids in whole]),
            "response_mask": nested([torch.ones_like(ids) for ids in responses]),
            "loss_mask": nested([torch.ones_like(ids) for ids in responses]),
            "advantages": nested(
                [torch.full((len(ids),), (-1.0) ** number) for number, ids in zip(samples, responses, strict=True)]
            ),
            **fields,
        },
        batch_size=len(whole),
    )
    tu.assign_non_tensor(
        data, temperature=1.0, calculate_entropy=True, global_token_num=[len(ids) for ids in whole], compute_loss=False
    )
    return data


def scored(built: Any, data: TensorDict) -> TensorDict:
    """Run the pass that computes old log-probabilities, and add them to the batch, and routes if it returned any."""
    output = built.infer_batch(data.clone())
    data = data.clone()
    data["old_log_probs"] = response_from_nested(output["log_probs"], data["response_mask"]).float()
    if "routed_experts" in output.keys():  # a TensorDict iterates over its rows
        data["routed_experts"] = output["routed_experts"]
    return data


def logprobs(built: Any, data: TensorDict) -> list[list[float]]:
    """Return the log-probabilities of each sample's response."""
    output = built.infer_batch(data.clone())
    return [row.tolist() for row in response_from_nested(output["log_probs"], data["response_mask"]).unbind()]


def update(built: Any, data: TensorDict, mini_batch: int | None = None, epochs: int = 1, shuffle: bool = False) -> Any:
    """Run verl's update over a batch, and return its metrics."""
    data = data.clone()
    ranks = torch.distributed.get_world_size()
    size = mini_batch or len(data) * ranks
    options = {"dataloader_kwargs": {"shuffle": shuffle}, "seed": 0}
    tu.assign_non_tensor(data, mini_batch_size=size, global_batch_size=size, epochs=epochs, **options)
    return tu.get(built.train_mini_batch(data), "metrics")


def parameters(built: Any) -> str:
    """Return a digest of all weights, to the last bit."""
    digest = hashlib.sha256()
    for name, value in sorted(built.engine.module.state_dict().items()):
        digest.update(name.encode() + whole(value).float().numpy().tobytes())
    return digest.hexdigest()


def whole(value: Tensor) -> Tensor:
    """Return a tensor that ranks may share, as one."""
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach()


@contextlib.contextmanager
def experts_seen(built: Any) -> Iterator[list[Tensor]]:
    """Collect the ids that the experts of the first MoE layer are handed, forward pass after forward pass."""
    layout = moe_layout(built.engine.module)
    seen: list[Tensor] = []

    def look(module: Any, args: Any, kwargs: Any) -> None:
        found = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor) and not a.is_floating_point()]
        seen.extend(a.detach().clone() for a in found if a.shape[-1] == layout.top_k)

    handle = layout.routers[0].experts.register_forward_pre_hook(look, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


def as_rollout(routes: Tensor) -> Tensor:
    """Return routes as verl gets them from a rollout engine: 16 bits, and no row for the last sampled token."""
    rows = [row.to(torch.int16).clone() for row in routes.unbind()]
    for row in rows:
        row[-1] = 0
    return nested(rows)


def other(routes: Tensor) -> Tensor:
    """Return routes of which the last slot is another expert, of each sample another one, in every row that has one."""
    rows = []
    for number, row in enumerate(routes.unbind()):
        row = row.clone()
        for ids in row.flatten(0, 1):
            if ids.any():
                free = sorted(set(range(16)) - set(ids.tolist()))
                ids[-1] = free[number % len(free)]
        rows.append(row)
    return nested(rows)


def own_routes(model: str, samples: Sequence[int] = (0, 1, 2, 3)) -> Tensor:
    """Return what the model itself chooses, as a rollout engine would report it."""
    return as_rollout(scored(worker(model, {"routing": R2}), batch(samples))["routed_experts"])


def refused(run: Any, *args: Any, **kwargs: Any) -> str:
    """Return the class and message of an error of ours; anything else is raised, and nothing is an answer too."""
    try:
        run(*args, **kwargs)
    except MismatchError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


# Scenarios


def stock(model: str) -> dict[str, Any]:
    """Run verl's engine, and ours without a block, and ours with a block that measures only."""
    found = {}
    for name, vendor, block in (("verl", None, None), ("ours", "mismatch", None), ("monitor", "mismatch", {})):
        built = worker(model, block, vendor=vendor)
        data = scored(built, batch())
        metrics = [update(built, data) for _ in range(3)]
        found[name] = {
            "class": type(built.engine).__name__,
            "logprobs": [row.tolist() for row in data["old_log_probs"].unbind()],
            "grad_norm": [float(m["grad_norm"][0]) for m in metrics],
            "lr": [m["lr"] for m in metrics],
            "parameters": parameters(built),
            "keys": sorted(metrics[0]),
        }
    return found


def replay(model: str) -> dict[str, Any]:
    """Compare native, recorded and replayed passes and updates, whole and checkpointed."""
    native = worker(model, vendor=None)
    data = scored(native, batch())
    found: dict[str, Any] = {"native": [row.tolist() for row in data["old_log_probs"].unbind()]}
    update(native, data)
    found["native_parameters"] = parameters(native)

    recorded = worker(model, {"routing": R2})
    data = scored(recorded, batch())
    found["r2"] = [row.tolist() for row in data["old_log_probs"].unbind()]
    found["r2_dtype"] = str(data["routed_experts"].dtype)
    update(recorded, data)
    found["r2_parameters"], found["r2_metrics"] = parameters(recorded), recorded.engine.mismatch_metrics()
    found["r2_lost"] = refused(update, recorded, data.exclude("routed_experts"))

    routes = as_rollout(data["routed_experts"])
    for name, given in (("own", routes), ("other", other(routes))):
        for checkpointing in (False, True):
            built = worker(model, {"routing": R3}, enable_gradient_checkpointing=checkpointing)
            data = batch(routed_experts=given)
            with experts_seen(built) as seen:
                data = scored(built, data)
            key = f"{name}_checkpointed" if checkpointing else name
            update(built, data)
            found[key] = [row.tolist() for row in data["old_log_probs"].unbind()]
            found[f"{key}_parameters"] = parameters(built)
            found[f"{key}_metrics"] = built.engine.mismatch_metrics()
            # Padded to 14 tokens: what each sample's tokens were sent to, and what was asked for.
            width = max(a + b for a, b in zip(PROMPTS, RESPONSES, strict=True))
            handed = seen[0].view(4, width, -1)
            lengths = [a + b for a, b in zip(PROMPTS, RESPONSES, strict=True)]
            found[f"{key}_seen"] = [handed[i, : n - 1].tolist() for i, n in enumerate(lengths)]
            found[f"{key}_asked"] = [row[:-1, 0].tolist() for row in given.unbind()]
            found[f"{key}_last"] = [handed[i, n - 1].tolist() for i, n in enumerate(lengths)]
    asked = tu.assign_non_tensor(batch(routed_experts=other(routes)), mismatch_native=True)
    found["asked_native"] = logprobs(built, asked) == logprobs(
        built, tu.assign_non_tensor(batch(), mismatch_native=True)
    )
    found["report"] = worker(model, {"routing": R3}).engine.mismatch_report()
    return found


def layouts(model: str) -> dict[str, Any]:
    """Replay other routes in micro-batches of several shapes: whole, one by one, dynamic, packed, packed and filled up."""
    routes = other(own_routes(model, range(8)))
    found: dict[str, Any] = {}
    for name, options in {
        "whole": {"micro_batch": 4},
        "one_by_one": {"micro_batch": 1},
        "dynamic": {"tokens": 24},
        "packed": {"micro_batch": 4, "use_remove_padding": True},
        "packed_dynamic": {"tokens": 24, "use_remove_padding": True},
        "packed_filled": {
            "micro_batch": 4,
            "use_remove_padding": True,
            "engine": {"pad_to_length": True, "pad_to_length_bucket": 64},
        },
    }.items():
        built = worker(model, {"routing": R3}, **options)
        data = scored(built, batch(range(8), routed_experts=routes))
        metrics = update(built, data, mini_batch=4, epochs=2, shuffle=True)
        found[name] = {
            "logprobs": [row.tolist() for row in data["old_log_probs"].unbind()],
            "grad_norm": [float(value) for value in metrics["grad_norm"]],
            **built.engine.mismatch_metrics(),
        }
    native = worker(model, vendor=None)
    found["native"] = logprobs(native, batch(range(8)))
    recorded = worker(model, {"routing": R2}, tokens=24, optimizer={"lr": 0.0})
    data = scored(recorded, batch(range(8)))
    found["r2_dynamic"] = [row.tolist() for row in as_rollout(data["routed_experts"]).unbind()]
    found["r2_whole"] = [row.tolist() for row in own_routes_whole(model).unbind()]
    metrics = update(recorded, data, mini_batch=4, epochs=2, shuffle=True)
    found["r2_update"] = {"grad_norm": [float(v) for v in metrics["grad_norm"]], **recorded.engine.mismatch_metrics()}
    return found


def own_routes_whole(model: str) -> Tensor:
    """Return the model's own routes of eight samples, recorded in one forward pass."""
    return as_rollout(scored(worker(model, {"routing": R2}, micro_batch=8), batch(range(8)))["routed_experts"])


def faults(model: str) -> dict[str, Any]:
    """Hand the engine routes that are wrong for one sample, and return what it says; no weight may have changed."""
    routes = [row.clone() for row in own_routes(model).unbind()]
    built = worker(model, {"routing": R3})
    before = parameters(built)
    uids = ["a", "b", "c", "d"]

    def tried(number: int, change: Any, **fields: Any) -> str:
        given = list(copy.deepcopy(routes))
        given[number] = change(given[number])
        data = batch(routed_experts=nested(given), **fields)
        data["old_log_probs"] = nested([torch.zeros(n) for n in RESPONSES])
        tu.assign_non_tensor(data, uid=uids)
        return refused(update, built, data)

    def put(row: Tensor, index: Any, value: Any) -> Tensor:
        row[index] = torch.as_tensor(value, dtype=row.dtype)
        return row

    found = {
        "zero": tried(2, torch.zeros_like),
        "empty": tried(1, lambda row: row[:0]),
        "short": tried(0, lambda row: row[:-3]),
        "zeros_from": tried(0, lambda row: put(row, slice(9, None), 0)),
        "surplus": tried(3, lambda row: torch.cat([row, row[:1]])),
        "hole": tried(1, lambda row: put(row, 3, 0)),
        "range": tried(1, lambda row: put(row, (2, 1, 0), 16)),
        "layer": tried(3, lambda row: put(row, (slice(None), 1), 0)),
        "gone": refused(update, built, scored_natively(batch())),
    }
    # Layers swapped in all samples: only the model can tell.
    swapped = nested([row.flip(1) for row in routes])
    found["swapped"] = refused(built.infer_batch, batch(routed_experts=swapped))
    found["untouched"] = before == parameters(built)
    # What has no loss needs no routes: samples that fill up a batch, and what an agent loop adds at the end.
    masks = [torch.ones(n, dtype=torch.long) for n in RESPONSES]
    masks[2][:] = 0
    filled = {"loss_mask": nested(masks), "response_mask": nested(masks)}
    found["filler"] = tried(2, torch.zeros_like, **filled)
    masks = [torch.ones(n, dtype=torch.long) for n in RESPONSES]
    masks[0][4:] = 0
    ends = {"loss_mask": nested(masks), "response_mask": nested(masks)}
    found["tool_answer"] = tried(0, lambda row: put(row, slice(9, None), 0), **ends)
    found["tool_answer_short"] = tried(0, lambda row: put(row, slice(8, None), 0), **ends)
    return found


def scored_natively(data: TensorDict) -> TensorDict:
    """Return a batch with old log-probabilities of 0 and no routes."""
    data["old_log_probs"] = nested([torch.zeros(n) for n in RESPONSES])
    return data


def refusals(dense: str, moe: str) -> dict[str, str]:
    """Build engines that cannot do what their block asks for."""
    fp16 = {"precision": {"dtype": "float16"}}
    return {
        "dense": refused(worker, dense, {"routing": R3}),
        "dtype": refused(worker, dense, fp16, dtype="bfloat16"),
        "reference_dtype": refused(worker, dense, fp16, dtype="bfloat16", engine={"forward_only": True}),
        "fsdp1": refused(worker, moe, {"routing": R3}, engine={"strategy": "fsdp"}),
        "disabled": refused(worker, dense, {}, dtype="float16"),
    }


def reference(model: str) -> dict[str, Any]:
    """Score with a reference engine, which replays only where it was asked to."""
    routes = other(own_routes(model))
    found: dict[str, Any] = {"native": logprobs(worker(model, vendor=None), batch())}
    for name, block in (("off", R3), ("on", {**R3, "reference": True})):
        built = worker(model, {"routing": block}, engine={"forward_only": True})
        found[name] = logprobs(built, batch(routed_experts=routes))
        found[f"{name}_metrics"] = built.engine.mismatch_metrics()
    found["actor"] = logprobs(worker(model, {"routing": R3}), batch(routed_experts=routes))
    return found


def adapter(model: str) -> dict[str, Any]:
    """Score with an adapter, whose base is the reference: verl switches the adapter off for that pass."""
    complete = other(scored(worker(model, {"routing": R2}), batch())["routed_experts"])
    lora = {"lora_rank": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    found: dict[str, Any] = {}
    for mode in ("R2", "R3"):
        for wanted in (False, True):
            built = worker(model, {"routing": {"mode": mode, "reference": wanted}}, **lora)
            data = batch(routed_experts=complete if mode == "R2" else as_rollout(complete))
            base = built.infer_batch(tu.assign_non_tensor(data.clone(), no_lora_adapter=True))
            found[f"{mode}_base_{wanted}"] = [
                row.tolist() for row in response_from_nested(base["log_probs"], data["response_mask"]).unbind()
            ]
            found[f"{mode}_recorded_base_{wanted}"] = "routed_experts" in base.keys()
            found[f"{mode}_{wanted}"] = logprobs(built, data)
    return found


def scaler(model: str) -> dict[str, Any]:
    """Train in float16 with an overflow in the second update."""
    settings = {"init_scale": 1024.0, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 2}
    block = {
        "precision": {"dtype": "float16", "loss_scale": {**settings, "max_overflow_streak": 3}},
        "lr": {"period": 1, "count_from": "start"},
    }
    built = worker(model, block, dtype="float16", optimizer={"lr_warmup_steps": 2, "lr_scheduler_type": "cosine"})
    engine = built.engine
    found: dict[str, Any] = {"report": engine.mismatch_report(), "settings": {}, "updates": []}
    for name in settings:
        getter = getattr(engine.scaler, f"get_{name.replace('init_', '')}")
        found["settings"][name] = getter()
    data = scored(built, batch())
    for number in range(6):
        before = parameters(built)
        with overflowing(engine, number == 2):
            metrics = update(built, data)
        found["updates"].append(
            {
                "grad_norm": float(metrics["grad_norm"][0]),
                "lr": metrics["lr"][0],
                "changed": before != parameters(built),
                "epoch": engine.lr_scheduler.last_epoch,
                **engine.mismatch_metrics(),
            }
        )
    with overflowing(engine):
        found["endless"] = [refused(update, built, data) for _ in range(4)]
    return found


@contextlib.contextmanager
def overflowing(engine: Any, really: bool = True) -> Iterator[None]:
    """Let a gradient of this rank overflow in every step."""
    step = engine.optimizer_step

    def poisoned() -> float:
        next(engine.module.parameters()).grad.to_local()[0] = torch.inf
        return step()

    engine.optimizer_step = poisoned if really else step
    try:
        yield
    finally:
        del engine.optimizer_step


BLOCK16 = {
    "precision": {"dtype": "float16", "loss_scale": {"init_scale": 2.0**15, "growth_interval": 5}},
    "lr": {"surge": {"baseline_window": 3, "smoothing": 1}},
}
LENGTHS = [4.0, 4.0, 4.0, 4.0, 16.0, 16.0, 16.0, 16.0, 16.0, 16.0, 16.0, 16.0]


def resumable(model: str, out: str, resume: bool, kill_after: int | None = None, steps: int = 10) -> dict[str, Any]:
    """Train, save after every update, and be killed after one; or go on from the last save."""
    built = worker(model, BLOCK16, dtype="float16", optimizer={"lr_warmup_steps": 2, "lr_scheduler_type": "cosine"})
    engine = built.engine
    first, folders = 0, sorted(Path(out).glob("step_*"), key=lambda path: int(path.name[5:]))
    if resume:
        built.load_checkpoint(str(folders[-1]))
        first = int(folders[-1].name[5:])
    data, updates = batch(), []
    data = scored(built, data) if not resume else torch.load(Path(out) / "data.pt", weights_only=False)
    if not resume:
        Path(out).mkdir(exist_ok=True)
        torch.save(data, Path(out) / "data.pt")
    for step in range(first, steps):
        engine.mismatch_update_lr(response_length=LENGTHS[step])
        with overflowing(engine, step == 2):
            metrics = update(built, data)
        updates.append(
            {
                "step": step,
                "lr": metrics["lr"][0],
                "grad_norm": str(float(metrics["grad_norm"][0])),
                "parameters": parameters(built),
                **engine.mismatch_metrics(),
            }
        )
        built.save_checkpoint(str(Path(out) / f"step_{step + 1}"))
        (Path(out) / f"log_{step + 1}.json").write_text(json.dumps(updates[-1]))
        if step + 1 == kill_after:
            os.kill(os.getpid(), signal.SIGKILL)
    return {"updates": updates}


def schedules(model: str, out: str) -> dict[str, Any]:
    """Update under each of verl's schedules times the rule, with two optimizer steps per update; save, resume, go on."""
    block = {"lr": {"period": 2}}
    found: dict[str, Any] = {}
    for name in ("constant", "cosine"):
        optimizer = {"lr_warmup_steps": 2, "lr_scheduler_type": name, "min_lr_ratio": 0.05, "total_training_steps": 12}
        built = worker(model, block, micro_batch=2, optimizer=optimizer)
        applied = watched(built.engine.optimizer)
        data = scored(built, batch())
        reported = []
        for _ in range(7):
            reported += [rate for rate in update(built, data, mini_batch=2)["lr"] if rate is not None]
        folder = str(Path(out) / name)
        built.save_checkpoint(folder)
        resumed = worker(model, block, micro_batch=2, optimizer=optimizer)
        resumed.load_checkpoint(folder)
        later = watched(resumed.engine.optimizer)
        for _ in range(7, 12):
            reported += [rate for rate in update(resumed, data, mini_batch=2)["lr"] if rate is not None]
        stock_run = worker(model, vendor=None, micro_batch=2, optimizer=optimizer)
        first = stock_run.engine.lr_scheduler.get_last_lr()
        given = [update(stock_run, data, mini_batch=2)["lr"] for _ in range(12)]
        found[name] = {
            "applied": applied + later,
            "reported": reported,
            "metrics": resumed.engine.mismatch_metrics(),
            "stock": first + [rate for rates in given for rate in rates if rate is not None],
        }
    silent = worker(model, {"lr": {}})
    found["silent"] = refused(update, silent, data)
    return found


def watched(optimizer: Any) -> list[float]:
    """Return a list that fills with the rate at each step of an optimizer."""
    rates: list[float] = []
    optimizer.register_step_pre_hook(lambda opt, *_: rates.append(float(opt.param_groups[0]["lr"])))
    return rates


def damaged(model: str, out: str) -> dict[str, str]:
    """Load checkpoints without our state, with a damaged one, and with one of another rule."""
    import warnings

    block = {"precision": {"dtype": "float16", "loss_scale": {"init_scale": 1024.0}}, "lr": {"period": 2}}
    built = worker(model, block, dtype="float16")
    data = scored(built, batch())
    update(built, data)
    built.save_checkpoint(out)
    state = Path(out) / "mismatch.json"
    text, found = state.read_text(), {"files": sorted(path.name for path in Path(out).iterdir() if path.is_file())}
    state.write_text(text[: len(text) // 2])
    found["half"] = refused(built.load_checkpoint, out)
    state.write_text(text.replace('"schema": 1', '"schema": 9'))
    found["schema"] = refused(built.load_checkpoint, out)
    state.write_text(text.replace("periodic", "reactive"))
    found["rule"] = refused(built.load_checkpoint, out)
    state.unlink()
    built = worker(model, block, dtype="float16")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        built.load_checkpoint(out)
    found["missing"] = [str(w.message) for w in said if "loss" in str(w.message)]
    found["multipliers"] = []
    for _ in range(2):
        update(built, data)
        found["multipliers"].append(built.engine.mismatch_metrics()["lr_multiplier"])
    return found


def several(scenarios: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Run scenarios one after the other in this process: most of the time of each would go into imports."""
    return {name: globals()[name](**payload) for name, payload in scenarios.items()}


# Several ranks


def ranks(scenario: str, world: int, limit: float = 150, **payload: Any) -> Any:
    """Run a scenario on several ranks over gloo, and return what rank 0 did; all are killed when one fails."""
    running = []
    for rank in range(world):
        variables = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world}
        running.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.peers.verl_engine_scenarios", scenario, json.dumps(payload)],
                env={**os.environ, **{key: str(value) for key, value in variables.items()}},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        outputs = [process.communicate(timeout=limit) for process in running]
    finally:
        for process in running:
            process.kill()
    for process, (_, errors) in zip(running, outputs, strict=True):
        if process.returncode:
            raise SystemExit(errors[-3000:])
    line = next(line for line in outputs[0][0].splitlines() if line.startswith("RESULT "))
    return json.loads(line.removeprefix("RESULT "))


def write_routes(model: str, path: str) -> str:
    """Write routes of eight samples, which are not the model's own, for ranks to share."""
    torch.save(list(other(own_routes(model, range(8))).unbind()), path)
    return path


def share(routes: list[Tensor]) -> tuple[list[int], list[Tensor]]:
    """Return this rank's samples of eight, and their routes."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    mine = list(range(8))[rank * 8 // world : (rank + 1) * 8 // world]
    return mine, [routes[number] for number in mine]


def everywhere(value: Any) -> list[Any]:
    """Return every rank's value."""
    values = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def sharded(model: str, routes: str, path: str) -> dict[str, Any]:
    """Score and update eight samples that the ranks share, with R3 and with R2; gradients go to a file."""
    found: dict[str, Any] = {}
    given = torch.load(routes)
    gradients: dict[str, Tensor] = {}
    for mode in ("R3", "R2"):
        built = worker(model, {"routing": {"mode": mode, "agreement_rate": 1.0}})
        mine, rows = share(given)
        data = batch(mine, routed_experts=nested(rows)) if mode == "R3" else batch(mine)
        data = scored(built, data)
        found[mode] = sum(everywhere([row.tolist() for row in data["old_log_probs"].unbind()]), [])
        found[f"{mode}_routes"] = sum(everywhere([row.tolist() for row in data["routed_experts"].unbind()]), [])

        def keep(optimizer: Any, *_: Any, built: Any = built, mode: str = mode) -> None:
            for name, parameter in built.engine.module.named_parameters():
                gradients[f"{mode}.{name}"] = whole(parameter.grad).clone()

        built.engine.optimizer.register_step_pre_hook(keep)
        found[f"{mode}_grad_norm"] = float(update(built, data)["grad_norm"][0])
        found[f"{mode}_metrics"] = built.engine.mismatch_metrics()
    if torch.distributed.get_rank() == 0:
        torch.save(gradients, path)
    return found


def rank_faults(moe: str, dense: str, routes: str) -> dict[str, Any]:
    """Lose a sample's routes on the last rank, then let a gradient overflow there alone."""
    built = worker(moe, {"routing": R3})
    mine, rows = share(torch.load(routes))
    last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
    if last:
        rows[1] = torch.zeros_like(rows[1])
    found: dict[str, Any] = {"lost": everywhere(refused(built.infer_batch, batch(mine, routed_experts=nested(rows))))}
    built = worker(dense, {"precision": {"dtype": "float16", "loss_scale": {"init_scale": 1024.0}}}, dtype="float16")
    data = scored(built, batch(mine))
    update(built, data)
    before, scale = parameters(built), built.engine.scaler.get_scale()
    with overflowing(built.engine, last):
        update(built, data)
    metrics = built.engine.mismatch_metrics()
    found["kept"] = before == parameters(built)
    found["scales"] = everywhere([scale, built.engine.scaler.get_scale()])
    found["epochs"] = everywhere(built.engine.lr_scheduler.last_epoch)
    found["metrics"] = everywhere(metrics)
    return found


def main() -> None:
    """Run the scenario named on the command line."""
    name, payload = sys.argv[1], json.loads(sys.argv[2])
    result = sys.modules["__main__"].__dict__[name](**payload)
    print("\nRESULT " + json.dumps(result, default=str), flush=True)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
