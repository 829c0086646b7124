"""verl's real worker and FSDP2 engine with a config that does not act, beside stock ones."""

from __future__ import annotations

import warnings
from typing import Any

from tensordict import TensorDict

from tests.peers.verl.in_process.scenarios_replay import own_routes
from tests.peers.verl.in_process.workers import batch, logprobs, parameters, scored, update, worker

EMPTY: dict[str, Any] = {}


def _trained(built: Any, data: TensorDict) -> dict[str, Any]:
    data = scored(built, data)
    found: dict[str, Any] = {"logprobs": [row.tolist() for row in data["old_log_probs"].unbind()]}
    metrics = [update(built, data) for _ in range(3)]
    return found | {
        "grad_norm": [float(m["grad_norm"][0]) for m in metrics], "lr": [m["lr"] for m in metrics],
        "parameters": parameters(built), "keys": sorted(metrics[0]), "again": logprobs(built, batch()),
    }  # fmt: skip


def full(model: str) -> dict[str, Any]:
    """Train stock and measured, with the rollout's routes in the batch."""
    routes = own_routes(model)
    return {
        name: _trained(worker(model, block, vendor=vendor), batch(rollout=routes))
        for name, block, vendor in (("verl", None, None), ("measured", EMPTY, "mismatch"))
    }


def half(model: str) -> dict[str, Any]:
    """Train in float16 on a machine where verl's own scaler disables itself, which ends a run whose config acts."""
    found: dict[str, Any] = {}
    for name, block, vendor in (("verl", None, None), ("measured", EMPTY, "mismatch")):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            built = worker(model, block, vendor=vendor, dtype="float16")
            found[name] = _trained(built, batch())
        found[name]["scaler"] = type(built.engine.scaler).__name__
        if name == "measured":
            found["failed"] = [vars(failed) for failed in built.engine.checks.take()]
    return found
