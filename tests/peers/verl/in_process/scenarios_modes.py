"""verl's asynchronous modes without Ray: weights put aside by the real workers, and a rate whose rule counts steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from mismatch_ext.adapters.verl.block import RunMode
from mismatch_ext.adapters.verl.worker import MismatchDetachWorker
from verl.experimental.separation.engine_workers import DetachActorWorker

from mismatch_ext.checks import Checks
from tests.peers.verl.in_process.workers import (
    batch,
    logprobs,
    parameters,
    scored,
    strategy,
    update,
    worker,
)


def detached(kind: type[Any], built: Any) -> Any:
    """Return a worker of a kind around an engine that is there."""
    asked: Any = object.__new__(kind)
    asked.actor, asked.config = built, SimpleNamespace(actor=SimpleNamespace(strategy=strategy()))
    asked._strategy_handlers, asked._checks = None, Checks(True)
    return asked


def aside(model: str) -> dict[str, Any]:
    """Score by the weights of before an update, as verl's trainer does from its second local update on."""
    found = {}
    for kind in (DetachActorWorker, MismatchDetachWorker):
        built = worker(model, {})
        asked, data = detached(kind, built), batch()
        asked.save_model_to_cpu(0)
        first = _flat(logprobs(built, data))
        update(built, scored(built, data))
        moved, present = _flat(logprobs(built, data)), parameters(built)
        asked.save_model_to_cpu(1)
        asked.restore_model_from_cpu(0)
        again = _flat(logprobs(built, data))
        asked.restore_model_from_cpu(1)
        asked.clear_cpu_model(1)
        found[kind.__name__] = {
            "moved": _far(moved, first),
            "old": _far(again, first),
            "kept": parameters(built) == present,
            "saved": sorted(asked.cpu_saved_models),
        }
    return found


def _flat(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor([value for row in rows for value in row])


def _far(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


def skipped(model: str, folder: str) -> list[float]:
    """Return the rates of three steps of two updates, of which the second one is skipped; before the last one it is resumed."""
    mode = RunMode(name="separate_async", updates=2)

    def built() -> Any:
        return worker(model, {"lr": {"period": 1}}, mode=mode, optimizer={"lr": 1e-3, "lr_scheduler_type": "constant"})

    actor = built()
    data, rates = scored(actor, batch()), []
    for number in range(6):
        if number == 4:
            actor.engine.save_checkpoint(folder)
            actor = built()
            actor.engine.load_checkpoint(folder)
        if number % 2 == 0:
            actor.engine.mismatch_update_lr()
        if number == 1:
            actor.engine.optimizer_step = lambda: float("nan")
        rates.append(float(update(actor, data)["lr"][0]))
        if number == 1:
            del actor.engine.optimizer_step
    return rates


def statistics(model: str) -> dict[str, Any]:
    """Lead a rule by the statistics of two steps of two batches, and leave one out."""
    mode = RunMode(name="separate_async", updates=2)
    built = worker(model, {"lr": {"trigger": "response_length"}}, mode=mode)
    data = scored(built, batch())
    for step in range(2):
        built.engine.mismatch_update_lr(response_length=20.0 - 5 * step)
        for _ in range(2):
            update(built, data)
    history = [measurement.value for measurement in built.engine._rate.state.history]
    try:
        update(built, data)
    except Exception as error:  # noqa: BLE001 - the test says which
        return {"history": history, "left_out": f"{type(error).__name__}: {error}"}
    return {"history": history, "left_out": ""}
