"""Replay in verl's engine: planted routes, and what is left of a batch."""

from __future__ import annotations

from typing import Any

# Sets what verl reads when it is imported, here for the first time in the process that all scenarios are forked from.
import tests.peers.verl.in_process  # noqa: F401

# isort: split

import torch
from mismatch_ext.adapters.trl.overridden import overridden

from tests.peers.conformance.leftovers import alive
from tests.peers.conformance.routes import FAULTS
from tests.peers.verl.in_process.routes import nested, refused
from tests.peers.verl.in_process.scenarios_replay import own_routes
from tests.peers.verl.in_process.workers import batch, scored, update, worker


def replay(model: str) -> dict[str, Any]:
    """Update an engine under planted routes, and under the model's own.

    Args:
        model: Path of the model.
    """
    routes = own_routes(model)
    built = worker(model, {"routing": {"mode": "R3", "measured": 0.5}}, optimizer={"lr": 0.0})
    engine, during = built.engine, []
    data = scored(built, batch(rollout=routes))
    update(built, data)  # makes the optimizer's state
    before = alive(4)
    handle = engine.module.register_forward_pre_hook(lambda *_: during.append(alive(4) - before))
    update(built, data)
    handle.remove()
    found: dict[str, Any] = {"during": max(during), "after": alive(4) - before, "after a loss": [], "refused": {}}
    replay = engine.replay

    def updated(plant: Any) -> str:
        # No engine records the route of the last token.
        given = nested([torch.cat([plant(row[:-1]), row[-1:]]) for row in routes.unbind()])
        with overridden(replay, _checked=False):
            planted = batch(rollout=given)
            planted["old_log_probs"] = data["old_log_probs"]
            return refused(update, built, planted)

    for name, (plant, _) in [*FAULTS.items(), ("none", (lambda ids: ids, ""))]:
        message = updated(plant)
        found["refused"][name] = "" if message == "nothing was refused" else message
        found["after a loss"].append(alive(4) - before)
    return found
