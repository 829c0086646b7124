"""verl's fused head, whose log-probabilities arrive without logits, against the model's own head on the same samples."""

from __future__ import annotations

import math
import os
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from mismatch_ext.adapters.verl import engine
from mismatch_ext.adapters.verl.loss import make_loss
from mismatch_ext.adapters.verl.worker import MismatchWorker
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils import torch_functional

from mismatch_ext.config import MismatchConfig
from tests.peers.verl.in_process.losses import actor_config
from tests.peers.verl.in_process.routes import nested, other
from tests.peers.verl.in_process.scenarios_losses import number
from tests.peers.verl.in_process.scenarios_replay import apart, own_routes
from tests.peers.verl.in_process.workers import R3, batch, logprobs, scored, strategy, update, worker

FP16 = {"precision": {"dtype": "float16", "init_scale": 64.0}}
# Of each: which model, block, dtype, temperature of the rollouts, and whether batches are packed.
CASES: dict[str, tuple[str, dict[str, Any], str, float, bool]] = {
    "padded": ("dense", {"lr": {"period": 1}}, "float32", 0.7, False),
    "routes": ("moe", {"routing": R3}, "float32", 1.0, True),
    "float16": ("dense", FP16, "float16", 1.0, False),
}


def probe(built: Any) -> Any:
    """Return the worker that a driver asks for probes, around an engine that is there."""
    asked: Any = object.__new__(MismatchWorker)
    asked.actor, asked.config = built, SimpleNamespace(actor=SimpleNamespace(strategy=strategy()))
    return asked


def sampled(built: Any, temperature: float, **fields: Any) -> TensorDict:
    """Return a scored batch with reference and rollout off the old policy."""
    data = scored(built, tu.assign_non_tensor(batch(**fields), temperature=temperature))
    generator = torch.Generator().manual_seed(3)
    for name in ("ref_log_prob", "rollout_log_probs"):
        rows = [row + 0.1 * torch.randn(row.shape, generator=generator) for row in data["old_log_probs"].unbind()]
        data[name] = nested(rows)
    return data


def measured(models: dict[str, str], name: str, fused: bool, routes: Any) -> dict[str, Any]:
    """Score, update, probe and measure one case."""
    kind, block, dtype, temperature, packed = CASES[name]
    built = worker(
        models[kind],
        block,
        dtype=dtype,
        use_remove_padding=packed,
        use_fused_kernels=fused,
        optimizer={"clip_grad": 1e9},
    )
    fields = {"rollout": routes} if "routing" in block else {}
    data = sampled(built, temperature, **fields)
    found: dict[str, Any] = {"logprobs": [row.tolist() for row in data["old_log_probs"].unbind()]}
    ids = torch.randint(3, 16, (3, 9), generator=torch.Generator().manual_seed(1)).tolist()
    found["probes"] = probe(built).mismatch_look(ids, "float32")["logprobs"]
    parsed = MismatchConfig.parse({**block, "kl": {"estimator": "k3", "coef": 0.3, "baseline": "none"}})
    assert parsed is not None
    built.set_loss_fn(make_loss(actor_config(), parsed))
    built.engine.mismatch_update_lr()
    metrics = update(built, data)
    found["kl"] = [number(metrics[key]) for key in ("kl_loss", "loss", "grad_norm")]
    found["after"] = logprobs(built, data)
    found["metrics"] = built.engine.mismatch_metrics()
    return found


def heads(dense: str, moe: str) -> None:
    """Compare every case with the model's own head and with verl's fused one, which changes the model's class for good."""
    models = {"dense": dense, "moe": moe}
    routes = other(own_routes(moe))
    owns = {name: measured(models, name, False, routes) for name in CASES}
    for name, own in owns.items():
        fused = measured(models, name, True, routes)
        # In float16 the two heads have the same products, and sum gradients in other orders: Adam's first step has the size of
        # its rate whatever a gradient's, so that one about zero which rounds otherwise moves its weight the other way.
        close = 1e-5 if name != "float16" else 2e-3
        moved = apart(own["after"], own["logprobs"])
        assert moved > 0.1, name
        for what in ("logprobs", "probes"):
            assert apart(fused[what], own[what]) < close, (name, what)
        if name != "float16":
            assert apart(fused["after"], own["after"]) < close, name
        for one, two in zip(fused["kl"], own["kl"], strict=True):
            assert math.isclose(one, two, rel_tol=max(close, 1e-4), abs_tol=close), name
        for key in ("routing/set_mismatch_frac", "routing/compared_tokens", "lr_multiplier", "loss_scale"):
            assert fused["metrics"].get(key) == own["metrics"].get(key), (name, key)
    assert owns["routes"]["metrics"]["routing/set_mismatch_frac"] > 0.1


def widened() -> dict[str, str]:
    """Return the dtype of logits after they were handed to verl, by the kernels that it has."""
    found = {}
    for name, flash, npu, off in (
        ("none", False, False, "0"),
        ("flash", True, False, "0"),
        ("flash off", True, False, "1"),
        ("npu", False, True, "0"),
    ):
        output = SimpleNamespace(logits=torch.zeros(2, 4, dtype=torch.bfloat16))
        kernels = {"FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE": flash, "NPU_CROSS_ENTROPY_LOSS_AVAILABLE": npu}
        with (
            mock.patch.multiple(torch_functional, **kernels),
            mock.patch.dict(os.environ, {"VERL_DISABLE_FLASH_ATTN_CE": off}),
        ):
            engine._widen(output)
        found[name] = str(output.logits.dtype).removeprefix("torch.")
    return found
