"""verl's fused head, whose log-probabilities arrive without logits, against the model's own head on the same samples."""

from __future__ import annotations

import os
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from mismatch_ext.adapters.verl import engine
from mismatch_ext.adapters.verl.engine import MismatchFSDPEngine, checked
from mismatch_ext.adapters.verl.loss import make_loss
from mismatch_ext.adapters.verl.worker import MismatchWorker
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils import torch_functional
from verl.workers.utils.padding import response_from_nested

from mismatch_ext.config import ESTIMATORS, MismatchConfig
from tests.peers.verl.in_process.losses import actor_config
from tests.peers.verl.in_process.routes import nested, other, refused
from tests.peers.verl.in_process.scenarios_losses import number
from tests.peers.verl.in_process.scenarios_replay import own_routes
from tests.peers.verl.in_process.workers import R3, batch, logprobs, scored, strategy, update, worker

FP16 = {"precision": {"dtype": "float16", "init_scale": 64.0}}
# Of each: which model, block, dtype, temperature of the rollouts, and whether batches are packed.
CASES: dict[str, tuple[str, dict[str, Any], str, float, bool]] = {
    "padded": ("dense", {"lr": {"period": 1}}, "float32", 0.7, False),
    "packed": ("dense", {"correction": {"preset": "bypass_ppo_clip_geo_rs"}}, "float32", 0.7, True),
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
    entropy = built.infer_batch(tu.assign_non_tensor(data.clone(), calculate_entropy=True))["entropy"]
    found["entropy"] = [row.tolist() for row in response_from_nested(entropy, data["response_mask"]).unbind()]
    asked = probe(built)
    ids = torch.randint(3, 16, (3, 9), generator=torch.Generator().manual_seed(1)).tolist()
    found["probes"] = asked.mismatch_look(ids, "float32")["logprobs"]
    found["vocabulary"] = asked.mismatch_vocabulary(ids, 12)
    assert isinstance(built.engine, MismatchFSDPEngine)
    for estimator in ESTIMATORS if kind == "dense" else ESTIMATORS[:1]:
        parsed = MismatchConfig.parse({**block, "kl": {"estimator": estimator, "coef": 0.3, "baseline": "none"}})
        assert parsed is not None
        built.set_loss_fn(make_loss(actor_config(), parsed))
        built.engine.mismatch_update_lr()
        metrics = update(built, data)
        found[f"kl {estimator}"] = [number(metrics[key]) for key in ("kl_loss", "loss", "grad_norm")]
    found["after"] = logprobs(built, data)
    found["metrics"] = built.engine.mismatch_metrics()
    return found


def heads(dense: str, moe: str) -> dict[str, Any]:
    """Measure every case with the model's own head, then with verl's fused one, which changes the model's class for good."""
    models = {"dense": dense, "moe": moe}
    routes = other(own_routes(moe))
    measure = partial(measured, models, routes=routes)
    found: dict[str, Any] = {fused: {name: measure(name, fused) for name in CASES} for fused in (False, True)}
    return {"own": found[False], "fused": found[True]}


def refusals(dense: str) -> dict[str, str]:
    """Run what a fused head cannot be run with."""
    found = {"rounded": refused(checked, torch.zeros(2, dtype=torch.float16))}
    built = worker(dense, {}, use_fused_kernels=True, engine={"strategy": "fsdp2"})
    try:
        logprobs(built, batch())
    except RuntimeError as error:
        found["untied"] = str(error)
    return found


def widened() -> dict[str, str]:
    """Return the dtype of logits after they were handed to verl, by the kernels that it has, and by which function takes them."""
    found = {}
    for name, flash, npu, off in (
        ("none", False, False, ""),
        ("flash", True, False, ""),
        ("flash off", True, False, "1"),
        ("npu", False, True, ""),
        ("npu, flash off", True, True, "1"),
    ):
        logits = torch.zeros(2, 4, dtype=torch.bfloat16)
        taken: list[Any] = []
        kernel = mock.Mock(side_effect=lambda given, labels, taken=taken, **_: taken.append("kernel") or labels)
        own = mock.Mock(side_effect=lambda given, labels, taken=taken: taken.append("own") or labels)
        with (
            mock.patch.object(torch_functional, "FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE", flash),
            mock.patch.object(torch_functional, "NPU_CROSS_ENTROPY_LOSS_AVAILABLE", npu),
            mock.patch.object(torch_functional, "logprobs_from_logits_flash_attn", kernel),
            mock.patch.object(torch_functional, "logprobs_from_logits_torch_npu", kernel),
            mock.patch.object(torch_functional, "logprobs_from_logits_v2", own),
            mock.patch.dict(os.environ, {"VERL_DISABLE_FLASH_ATTN_CE": off or "0"}),
        ):
            output = SimpleNamespace(logits=logits)
            engine._widen(output)
            torch_functional.logprobs_from_logits(output.logits, torch.zeros(2, dtype=torch.int64))
        found[name] = f"{taken[0]} {str(output.logits.dtype).removeprefix('torch.')}"
    return found
