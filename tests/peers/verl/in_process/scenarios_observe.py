"""verl's real worker and FSDP2 engine under `mismatch.level: observe`, beside stock ones."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu

from tests.peers.verl.in_process.routes import nested
from tests.peers.verl.in_process.scenarios_replay import changed, own_routes
from tests.peers.verl.in_process.workers import R3, batch, logprobs, parameters, scored, update, worker

SECTIONS = {
    "routing": R3, "lr": {"period": 1}, "kl": {"coef": 0.5}, "correction": {"preset": "token_truncate"},
}  # fmt: skip
BLOCK = {"level": "observe", "precision": {"dtype": "float16"}, **SECTIONS}


def _compared(built: Any, data: TensorDict) -> tuple[dict[str, float], list[Any]]:
    """Ask for the pass that compares routes, and return the agreement and what was found."""
    built.infer_batch(tu.assign_non_tensor(data.clone(), mismatch_observed=True))
    return built.engine.mismatch_metrics(), [vars(finding) for finding in built.engine.verdicts.take()]


def _trained(built: Any, data: TensorDict, between: Callable[[Any], Any] = lambda built: None) -> dict[str, Any]:
    data = scored(built, data)
    found: dict[str, Any] = {"logprobs": [row.tolist() for row in data["old_log_probs"].unbind()], "between": []}
    metrics = []
    for _ in range(3):
        found["between"].append(between(built))
        metrics.append(update(built, data))
    return found | {
        "grad_norm": [float(m["grad_norm"][0]) for m in metrics], "lr": [m["lr"] for m in metrics],
        "parameters": parameters(built), "keys": sorted(metrics[0]),
    }  # fmt: skip


def observe(model: str) -> dict[str, Any]:
    """Train stock and observed, with routes that are right and in four ways wrong, in dtypes that were not asked for."""
    routes = own_routes(model)
    rows = list(routes.unbind())

    def spoiled(number: int, change: Callable[[Tensor], Tensor]) -> TensorDict:
        given = copy.deepcopy(rows)
        given[number] = change(given[number])
        return batch(routed_experts=nested(given))

    spoils = {
        "right": batch(routed_experts=routes),
        "zero": spoiled(2, torch.zeros_like),
        "short": spoiled(0, lambda row: row[:-3]),
        "surplus": spoiled(3, lambda row: torch.cat([row, row[:1]])),
        "none": batch(),
        "altered": changed(batch(routed_experts=routes)),
    }
    found: dict[str, Any] = {}
    for name, block, vendor in (("verl", None, None), ("observe", BLOCK, "mismatch")):
        built = worker(model, block, vendor=vendor)
        if name == "observe":
            found["at_start"] = [vars(finding) for finding in built.engine.verdicts.take()]
            found["report"] = built.engine.mismatch_report()

        def between(built: Any, observed: bool = name == "observe") -> Any:
            if not observed:
                return None
            return {case: _compared(built, data) for case, data in spoils.items()}

        found[name] = _trained(built, batch(routed_experts=routes), between)
        found[name]["again"] = logprobs(built, batch())
    # Whose layers they are is asked once, of the first that are compared.
    swapped = worker(model, BLOCK)
    swapped.engine.verdicts.take()
    found["swapped"] = _compared(swapped, batch(routed_experts=nested([row.flip(1) for row in rows])))[1]
    return found


def half(model: str) -> dict[str, Any]:
    """Train in float16 on a machine where verl's own scaler disables itself, which is refused and here found."""
    found: dict[str, Any] = {}
    for name, block, vendor in (("verl", None, None), ("observe", {"level": "observe"}, "mismatch")):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            built = worker(model, block, vendor=vendor, dtype="float16")
            found[name] = _trained(built, batch())
        found[name]["scaler"] = type(built.engine.scaler).__name__
        if name == "observe":
            found["findings"] = [vars(finding) for finding in built.engine.verdicts.take()]
    return found
