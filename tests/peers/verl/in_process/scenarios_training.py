"""Loss scale, learning rate and checkpoints in verl's FSDP engine, and blocks that it cannot do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tests.peers.verl.in_process.routes import refused
from tests.peers.verl.in_process.workers import R3, batch, parameters, scored, update, worker


def refusals(dense: str) -> str:
    """Build an engine that is to replay a model without experts."""
    return refused(worker, dense, {"routing": R3})


def scaler(model: str) -> dict[str, Any]:
    """Train in float16 with an overflow in the second update."""
    settings = {"init_scale": 1024.0, "growth_interval": 2}
    block = {
        "precision": {"dtype": "float16", **settings},
        "lr": {"period": 1, "warmup_steps": 0},
    }
    built = worker(model, block, dtype="float16", optimizer={"lr_warmup_steps": 2, "lr_scheduler_type": "cosine"})
    engine = built.engine
    found: dict[str, Any] = {"updates": []}
    assert engine.scaler.is_enabled() and engine._autocast_dtype == torch.float16
    assert {parameter.dtype for parameter in engine.module.parameters()} == {torch.float32}
    data = scored(built, batch())
    for number in range(6):
        before = parameters(built)
        with overflowing(engine, number == 2):
            metrics = update(built, data)
        found["updates"].append(
            {
                "grad_norm": float(metrics["grad_norm"][0]),
                "changed": before != parameters(built),
                "epoch": engine.lr_scheduler.last_epoch,
                **engine.mismatch_metrics(),
            }
        )
    with overflowing(engine):
        found["endless"] = [refused(update, built, data) for _ in range(12)]
    return found


def sent(model: str) -> list[str]:
    """Return the names of the model's weights that the rollout does not get."""
    engine = worker(model, {"precision": {"dtype": "float32"}}).engine
    known = {name.removeprefix("_fsdp_wrapped_module.") for name in engine.module.state_dict()}
    weights, _ = engine.get_per_tensor_param()
    return sorted(known - {name for name, _ in weights})


def halves(model: str) -> dict[str, list[list[float]]]:
    """Return log-probabilities of the same samples in float32, in bfloat16, and in float16 by the block."""
    blocks: dict[str, Any] = {"float32": None, "bfloat16": None, "float16": {"precision": {"dtype": "float16"}}}
    found = {}
    for dtype, block in blocks.items():
        data = scored(worker(model, block, dtype=dtype), batch())
        found[dtype] = [row.tolist() for row in data["old_log_probs"].unbind()]
    return found


@contextlib.contextmanager
def overflowing(engine: Any, really: bool = True) -> Iterator[None]:
    """Let a gradient of this rank overflow in every step."""
    step = engine.optimizer_step

    def poisoned() -> float:
        gradient = next(engine.module.parameters()).grad
        (gradient.to_local() if isinstance(gradient, DTensor) else gradient)[0] = torch.inf
        return step()

    engine.optimizer_step = poisoned if really else step
    try:
        yield
    finally:
        del engine.optimizer_step


def schedules(model: str, out: str) -> dict[str, Any]:
    """Update under verl's schedule times the rule, with two optimizer steps per update; save, resume, go on."""
    optimizer = {"lr_warmup_steps": 2, "lr_scheduler_type": "cosine", "min_lr_ratio": 0.05, "total_training_steps": 12}
    reported: list[float] = []

    def built() -> Any:
        return worker(model, {"lr": {"period": 2}}, micro_batch=2, optimizer=optimizer)

    def train(one: Any, updates: int) -> None:
        for _ in range(updates):
            reported.extend(rate for rate in update(one, data, mini_batch=2)["lr"] if rate is not None)

    first, resumed = built(), built()
    applied = watched(first.engine.optimizer)
    data = scored(first, batch())
    train(first, 7)
    first.save_checkpoint(out)
    resumed.load_checkpoint(out)
    later = watched(resumed.engine.optimizer)
    train(resumed, 5)
    found: dict[str, Any] = {"applied": applied + later, "reported": reported}
    silent = worker(model, {"lr": {}})
    found["silent"] = refused(update, silent, data)
    return found


def watched(optimizer: Any) -> list[float]:
    """Return a list that fills with the rate at each step of an optimizer."""
    rates: list[float] = []
    optimizer.register_step_pre_hook(lambda opt, *_: rates.append(float(opt.param_groups[0]["lr"])))
    return rates


def damaged(model: str, out: str) -> dict[str, Any]:
    """Load checkpoints without our state, and with a damaged one."""
    import warnings

    block = {"precision": {"dtype": "float16", "init_scale": 1024.0}, "lr": {"period": 2}}
    built = worker(model, block, dtype="float16")
    data = scored(built, batch())
    update(built, data)
    built.save_checkpoint(out)
    state = Path(out) / "mismatch.json"
    text = state.read_text()
    found: dict[str, Any] = {}
    state.write_text(text[: len(text) // 2])
    found["half"] = refused(built.load_checkpoint, out)
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
