"""Runs with the real TRL and vLLM, each in a process of its own."""

from __future__ import annotations

import os

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import functools
import hashlib
import signal
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
from datasets import Dataset
from mismatch_ext.adapters import vllm as engine
from mismatch_ext.adapters.trl import MismatchGRPOConfig, MismatchGRPOTrainer, MismatchTrainerMixin
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from examples.arithmetic.task import make_dataset
from mismatch_ext.errors import WeightSyncError
from mismatch_ext.report import load_runs, summarize, tables
from tests.oracle import watch_float32_error
from tests.peers.engines.kept_decode import keep_decode
from tests.peers.engines.sleeping import note_updates, sleepy
from tests.peers.trl.ends import watch_ends

VERIFIED = {"monitor": {"weight_sync": "error"}}
"""A config that acts, and changes no number."""
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


class Seen(TrainerCallback):
    """Keeps what a logger gets of this package's metrics."""

    def __init__(self) -> None:
        self.names: list[list[str]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Note the names of a log of a step."""
        if "loss" in logs:
            self.names.append([name for name in logs if "mismatch/" in name])


def train(model: str, out: str, block: Any, **overrides: Any) -> dict[str, Any]:
    """Train with a block."""
    seen = Seen()
    trainer = build(model, out, block, callbacks=[seen], **overrides)
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
        seen=seen.names,
    )


def mixin(model: str, out: str, block: Any) -> dict[str, Any]:
    """Train with the mixin over a user's own subclass."""

    class Own(GRPOTrainer):
        called = 0

        def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
            Own.called += 1
            return super()._calculate_rewards(*args, **kwargs)

    class OwnWithBlock(MismatchTrainerMixin, Own):
        pass

    trainer = OwnWithBlock(
        model=model, reward_funcs=graded, train_dataset=rows(),
        args=MismatchGRPOConfig(**arguments(out, mismatch=block, max_steps=1)),
    )  # fmt: skip
    trainer.train()
    return outcome(trainer, own_called=Own.called)


def lora(model: str, out: str, dtype: str) -> dict[str, Any]:
    """Train LoRA adapters, on the embeddings too, which TRL merges for each weight update and unmerges after it."""
    from peft import LoraConfig

    block: dict[str, Any] = {"precision": {"dtype": "float32"}} if dtype == "float32" else {}
    trainer = MismatchGRPOTrainer(
        model=model,
        reward_funcs=graded,
        train_dataset=rows(),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "up_proj", "embed_tokens"]),
        args=MismatchGRPOConfig(
            **arguments(out, mismatch=block, learning_rate=1e-2, model_init_kwargs={"dtype": dtype})
        ),
    )
    errors = watch_float32_error(trainer) if dtype == "float32" else []
    probes = trainer.mm.checked.verifier.probes
    before = trainer.mm.score(probes)
    trainer.train()
    moved = float((trainer.mm.score(probes) - before).abs().mean())
    merged = [name for name, module in trainer.model.named_modules() if getattr(module, "merged", False)]
    return outcome(trainer, merged=merged, verdict=trainer.mm.verdict.status, moved=moved, float32_errors=errors)


def kept_decode(model: str, out: str, dtype: str) -> dict[str, Any]:
    """Let the engine decode with what it has after the first step, and prefill with what it gets."""

    class Keep(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                keep_decode(engine.runner(trainer.vllm_generation.llm).model.model)

    block = {"precision": {"dtype": dtype, "init_scale": 1024.0}}
    trainer = build(model, out, block, [Keep()], max_steps=4, learning_rate=1e-2, warmup_steps=0)
    try:
        trainer.train()
    except WeightSyncError as error:
        return {"error": str(error), "steps": trainer.state.global_step, "verdict": vars(trainer.mm.verdict)}
    return {"error": None, "verdict": vars(trainer.mm.verdict), "history": history(trainer)}


def seams(model: str, out: str) -> dict[str, Any]:
    """Change the engine wrapper's temperature and the trainer's weights behind TRL's back."""
    trainer = build(model, out, {"precision": {"dtype": "float32"}}, max_steps=1)
    trainer.train()
    trainer.vllm_generation.max_completion_length = 3
    version = trainer.mm.checked.weight_version
    with torch.no_grad():
        trainer.model.model.norm.weight.mul_(1.5)
    _, completions, _, _ = trainer.vllm_generation.generate([[5, 6, 7]] * 4, None, 1)
    return {
        "inner": trainer.vllm_generation.max_completion_length,
        "longest": max(map(len, completions)),
        "updates": trainer.mm.checked.weight_version - version,
        "verdict": trainer.mm.verdict.status,
    }


def evaluated_then_resumed(model: str, out: str, resume: str) -> dict[str, Any]:
    """Evaluate before resuming, as a script that measures first does."""
    trainer = build(model, out, {}, max_steps=4, save_strategy="steps", save_steps=1, per_device_eval_batch_size=8)
    trainer.evaluate(rows(2))
    alone = load_runs(trainer.mm.log.run_dir)
    trainer.train(resume_from_checkpoint=resume)
    return {"missing in the evaluation": tables.missing(alone, summarize(alone)), **outcome(trainer)}


def moe_sync(model: str, out: str, repaired: bool, plain: bool = False) -> dict[str, Any]:
    """Train a mixture of experts with or without the repair of vLLM's CPU weight update."""
    from mismatch_ext.adapters.vllm import weights

    repair = nullcontext() if repaired else mock.patch.object(weights, "applied", lambda *_: nullcontext())
    with repair:
        return train(model, out, {"precision": {"dtype": "float32"}}, max_steps=2)


def stale(model: str, out: str, dtype: str) -> dict[str, Any]:
    """Train with an engine that ignores every weight update after the first."""
    from mismatch_ext.adapters.trl import generation

    update = engine.update_weights
    calls = []

    def forgetful(llm: Any, named: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            update(llm, named)

    with mock.patch.object(generation.engine, "update_weights", forgetful):
        return train(model, out, {"precision": {"dtype": dtype}})


def sleeping(model: str, out: str, loses: str = "") -> dict[str, Any]:
    """Train with an engine that sleeps between generations, where sleep takes its weights, and buffers of a name for good."""
    with sleepy(loses) as slept:
        trainer = build(model, out, VERIFIED, vllm_enable_sleep_mode=True)
        error = ""
        note_updates(trainer.mm.engine, trainer.vllm_generation, slept)
        try:
            trainer.train()
        except WeightSyncError as raised:
            error = str(raised)
    return outcome(trainer, slept=slept, error=error, verdict=status_of(trainer))


class AtStep(TrainerCallback):
    """Call a function at the end of one step."""

    def __init__(self, step: int, action: Callable[[], None]) -> None:
        self.step, self.action = step, action

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Act when the step has come."""
        if state.global_step == self.step:
            self.action()


def engine_dies(model: str, out: str, **overrides: Any) -> dict[str, Any]:
    """End the engine after the second step, behind the trainer's back."""
    trainer = build(model, out, {}, max_steps=5, **overrides)
    trainer.add_callback(AtStep(2, lambda: trainer.vllm_generation.llm.llm_engine.engine_core.shutdown()))
    trainer.train()
    return outcome(trainer)


def nan_logprobs(model: str, out: str) -> dict[str, Any]:
    """Make the engine report NaN for one sampled token of the second batch."""
    trainer = build(model, out, VERIFIED, max_steps=5)
    checked = trainer.mm.checked
    generate = checked.plain_generate
    calls = []

    def spoiled(*args: Any, **kwargs: Any) -> Any:
        result = generate(*args, **kwargs)
        calls.append(1)
        if len(calls) == 2:
            result[2][3][1][0] = None  # TRL's form of NaN: rollout 3, token 1
        return result

    checked.plain_generate = spoiled
    trainer.train()
    return outcome(trainer)


def killed(model: str, out: str, block: Any, kill_after: int | None, resume: str | None = None) -> dict[str, Any]:
    """Train with a checkpoint per step; die by SIGKILL after a step, or resume."""
    callbacks = [AtStep(kill_after, lambda: os.kill(os.getpid(), signal.SIGKILL))] if kill_after else []
    trainer = build(model, out, block, callbacks, max_steps=4, save_strategy="steps", save_steps=1)
    trainer.train(resume_from_checkpoint=resume)
    return outcome(trainer, scaler=trainer.accelerator.scaler.state_dict())


def parsed(argv: list[str]) -> dict[str, Any]:
    """Parse a command line with TrlParser."""
    from trl import TrlParser

    (config,) = TrlParser(MismatchGRPOConfig).parse_args_and_config(argv)
    return {"mismatch": config.mismatch, "fp16": config.fp16, "bf16": config.bf16}
