"""Replay in TRL's trainer: planted routes, and what is left of a batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from mismatch_ext.adapters.trl.overridden import overridden
from mismatch_ext.adapters.trl.passes import RolloutPass

from mismatch_ext.errors import MismatchError
from tests.peers.conformance.leftovers import alive, held
from tests.peers.conformance.routes import FAULTS
from tests.peers.trl.scenarios_routing import R2, build, routes_of


def replay(model: str, out: str) -> dict[str, Any]:
    """Train a step, then compute losses of its micro-batch under planted routes and under its own.

    Args:
        model: Path of the model.
        out: Output directory.
    """
    half = {**R2, "measured": 0.5}
    trainer = build(model, out, half, max_steps=1, learning_rate=0.0, per_device_train_batch_size=8)
    trainer.train()
    kept = held(RolloutPass)
    trainer.model.train()
    routing, inputs, known = trainer.mm.routing, trainer._buffered_inputs[0], routes_of(trainer)
    own = dict(known)
    found: dict[str, Any] = {"after a loss": [], "refused": {}}

    def computed(change: Any) -> str:
        for key, trace in own.items():
            known[key] = replace(trace, parts=(change(trace.experts.to(torch.int64)).to(trace.parts[0].dtype),))
        try:
            trainer.compute_loss(trainer.model, inputs)
        except MismatchError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    computed(lambda ids: ids)
    before, during = alive(8), []
    handle = trainer.model.register_forward_pre_hook(lambda *_: during.append(alive(8) - before))
    computed(lambda ids: ids)
    handle.remove()
    found |= {"during": max(during), "after": alive(8) - before + kept}
    for name, (plant, _) in [*FAULTS.items(), ("none", (lambda ids: ids, ""))]:
        with overridden(routing, _checked=False):
            found["refused"][name] = computed(plant)
        found["after a loss"].append(alive(8) - before)
    return found
