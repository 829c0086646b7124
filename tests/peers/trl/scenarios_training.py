"""Runs with the real TRL and vLLM, each in a process of its own."""

from __future__ import annotations

import os

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import functools
import hashlib
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from datasets import Dataset
from mismatch_ext.adapters import vllm as engine
from mismatch_ext.adapters.trl import MismatchGRPOConfig, MismatchGRPOTrainer
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from examples.arithmetic.task import make_dataset
from mismatch_ext.errors import WeightSyncError
from tests.oracle import watch_float32_error
from tests.peers.engines.kept_decode import keep_decode
from tests.peers.engines.sleeping import note_updates, sleepy
from tests.peers.trl.ends import watch_ends

KEPT = ("loss", "grad_norm", "reward", "entropy", "completions/mean_length", "learning_rate")


def arguments(out: str, **overrides: Any) -> dict[str, Any]:
    """Return trainer arguments for a short run on a CPU."""
    return {
        "output_dir": out, "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 16,
        "max_steps": 3, "logging_steps": 1, "report_to": "none", "save_strategy": "no", "learning_rate": 1e-3,
        "use_cpu": True, "use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.05,
        "vllm_max_model_length": 64, "disable_tqdm": True, "gradient_checkpointing": False, "seed": 0, "beta": 0.0,
        "vllm_importance_sampling_mode": "token_truncate",
        **overrides,
    }  # fmt: skip


def rows(steps: int = 8) -> Dataset:
    """Return prompts enough for some steps."""
    return Dataset.from_list(make_dataset(2 * steps, seed=5))


def graded(completions: list[str], **_: Any) -> list[float]:
    """Reward that varies between completions of a random model, so that there is a gradient."""
    return [sum(c in "02468" for c in text) / max(len(text), 1) for text in completions]


def keep_names(trainer: Any) -> None:
    """Save experts under the model's own names: transformers loads no others when it resumes (transformers#48805)."""
    trainer.model.save_pretrained = functools.partial(trainer.model.save_pretrained, save_original_format=False)


def build(model: str, out: str, block: Any, callbacks: Any = None, **overrides: Any) -> MismatchGRPOTrainer:
    """Build a trainer with a block."""
    return MismatchGRPOTrainer(
        model=model,
        reward_funcs=graded,
        args=MismatchGRPOConfig(**arguments(out, mismatch=block, **overrides)),
        train_dataset=rows(),
        callbacks=callbacks,
    )


def digest_of(model: torch.nn.Module) -> str:
    """Return a digest of all parameters, bit for bit."""
    sha = hashlib.sha256()
    for name, parameter in sorted(model.state_dict().items()):
        sha.update(name.encode() + parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def history(trainer: Any) -> list[dict[str, float]]:
    """Return what the trainer logged at each step."""
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [{k: v for k, v in entry.items() if k in KEPT or "mismatch/" in k} for entry in logged]


def outcome(trainer: Any, **extra: Any) -> dict[str, Any]:
    """Return what tests compare."""
    return {"history": history(trainer), "parameters": digest_of(trainer.model), **extra}


def status_of(trainer: Any) -> str | None:
    """Return what the last weight update was found to be; None where none was verified."""
    verdict = None if trainer.mm is None else trainer.mm.verdict
    return None if verdict is None else verdict.status


def forwards(trainer: Any) -> int:
    """Return the number of replayed forward passes."""
    mm = getattr(trainer, "mm", None)
    return 0 if mm is None or mm.routing is None else int(mm.routing.forwards)


def packed_layers(trainer: Any) -> int:
    """Return how many linear layers of the engine have given their weight away to a packed copy."""
    layers = engine.runner(trainer.vllm_generation.llm).model.modules()
    return sum(hasattr(layer, "cpu_linear") and layer.weight.numel() == 0 for layer in layers)


def stock(model: str, out: str, cls: str, **overrides: Any) -> dict[str, Any]:
    """Train with stock GRPOTrainer, or with ours and no block."""
    trainer_class, config_class = {
        "stock": (GRPOTrainer, GRPOConfig),
        "ours": (MismatchGRPOTrainer, MismatchGRPOConfig),
    }[cls]
    # The first shape to be compiled by torch depends on what the process did before; eager on both sides does not.
    trainer = trainer_class(
        model=model, reward_funcs=graded, args=config_class(**arguments(out, **overrides)), train_dataset=rows()
    )
    trainer.train()
    packed = packed_layers(trainer) if overrides.get("use_vllm", True) else None
    return outcome(trainer, active=sorted(k for k in vars(trainer) if k == "_log"), packed=packed)


def train(model: str, out: str, block: Any, **overrides: Any) -> dict[str, Any]:
    """Train with a block."""
    trainer = build(model, out, block, **overrides)
    exact = (block.get("precision") or {}).get("dtype") == "float32"
    errors = watch_float32_error(trainer) if exact else []
    ends = watch_ends(trainer)
    trainer.train()
    scaler = trainer.accelerator.scaler
    return outcome(
        trainer,
        float32_errors=errors,
        ends=ends,
        packed=packed_layers(trainer),
        scaler=None if scaler is None else scaler.state_dict(),
        engine_dtype=trainer.mm.checked.reading.model_dtype,
        weight_version=trainer.mm.checked.weight_version,
        verdict=status_of(trainer),
    )


def kept_decode(model: str, out: str) -> None:
    """Let the engine decode with what it has after the first step, and prefill with what it gets."""
    block = {"precision": {"dtype": "float16", "init_scale": 1024.0}}
    trainer = build(model, out, block, max_steps=4, learning_rate=1e-2, warmup_steps=0)
    trainer.add_callback(AtStep(1, lambda: keep_decode(engine.runner(trainer.vllm_generation.llm).model.model)))
    with pytest.raises(WeightSyncError, match="decode path does not compute with the weights that its prefill has"):
        trainer.train()
    # Nothing of the first batch that it would have sampled is trained on.
    assert trainer.state.global_step == 1
    verdict = trainer.mm.verdict
    assert verdict.status == "stale_decode" and verdict.gap_mean < verdict.threshold


def seams(model: str, out: str) -> None:
    """Change the engine wrapper's temperature and the trainer's weights behind TRL's back."""
    trainer = build(model, out, {"precision": {"dtype": "float32"}}, max_steps=1)
    trainer.train()
    trainer.vllm_generation.max_completion_length = 3
    version = trainer.mm.checked.weight_version
    with torch.no_grad():
        trainer.model.model.norm.weight.mul_(1.5)
    _, completions, _, _ = trainer.vllm_generation.generate([[5, 6, 7]] * 4, None, 1)
    assert trainer.vllm_generation.max_completion_length == 3 and max(map(len, completions)) <= 3
    assert trainer.mm.checked.weight_version == version + 1 and trainer.mm.verdict.status == "in_sync"


def moe_sync(model: str, out: str, repaired: bool) -> dict[str, Any]:
    """Train a mixture of experts with or without the repair of vLLM's CPU weight update."""
    from mismatch_ext.adapters.vllm import weights

    repair = nullcontext() if repaired else mock.patch.object(weights, "applied", lambda *_: nullcontext())
    with repair:
        return train(model, out, {"precision": {"dtype": "float32"}}, max_steps=2)


def stale(model: str, out: str) -> None:
    """Train with an engine that ignores every weight update after the first."""
    from mismatch_ext.adapters.trl import generation

    trainer = build(model, out, {"precision": {"dtype": "bfloat16"}})
    update = iter([engine.update_weights])
    forgetful = lambda llm, named: next(update, lambda *_: None)(llm, named)  # noqa: E731
    with mock.patch.object(generation.engine, "update_weights", forgetful):
        with pytest.raises(WeightSyncError, match="stale"):
            trainer.train()


def sleeping(model: str, out: str, loses: str = "") -> None:
    """Train with an engine that sleeps between generations, where sleep takes its weights, and buffers of a name for good."""
    with sleepy(loses) as slept:
        trainer = build(model, out, {"monitor": {"weight_sync": "error"}}, vllm_enable_sleep_mode=True)
        note_updates(trainer.mm.engine, trainer.vllm_generation, slept)
        if loses:
            # The first update is doubted, and the second one leaves no doubt.
            with pytest.raises(WeightSyncError, match="weight update 2: garbled"):
                trainer.train()
            assert len(history(trainer)) == 1
            return
        trainer.train()
    assert trainer.mm.verdict.status in ("in_sync", "unchanged")
    # The cache is woken for the probes, and again by TRL.
    assert slept == ["asleep", *["kv_cache", "loaded", "kv_cache", "asleep"] * len(history(trainer))]


class AtStep(TrainerCallback):
    """Call a function at the end of one step."""

    def __init__(self, step: int, action: Callable[[], None]) -> None:
        self.step, self.action = step, action

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Act when the step has come."""
        if state.global_step == self.step:
            self.action()


def engine_dies(model: str, out: str) -> None:
    """End the engine after the second step, behind the trainer's back."""
    trainer = build(model, out, {}, max_steps=5, logging_steps=10)
    trainer.add_callback(AtStep(2, lambda: trainer.vllm_generation.llm.llm_engine.engine_core.shutdown()))
    trainer.train()
