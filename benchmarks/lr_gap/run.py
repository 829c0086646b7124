"""One run: an engine, learning-rate control on or off, a seed."""

from __future__ import annotations

import os

# Before vLLM is imported: a small KV cache, and silence where the trainer already reports.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import json
from pathlib import Path
from typing import Any

from datasets import Dataset
from mismatch_ext.adapters.trl import MismatchGRPOConfig, MismatchGRPOTrainer
from mismatch_ext.patches.trl.engine_arguments import engine_arguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from benchmarks.harness import be_quiet
from benchmarks.lr_gap.sampler import TrainerSampler
from examples.arithmetic.task import make_dataset, reward

SETTINGS, EVALUATION = "settings.json", "evaluation.json"
"""A folder with the second file holds a finished run."""


class Fp8CacheTrainer(MismatchGRPOTrainer):
    """Starts the engine with an fp8 KV cache."""

    def _construction_patches(self, config: MismatchGRPOConfig) -> list[Any]:
        patches = super()._construction_patches(config)
        coarse = engine_arguments({"enforce_eager": True, "kv_cache_dtype": "fp8_e5m2"})
        return [coarse if patch.name == coarse.name else patch for patch in patches]


def configuration(settings: dict[str, Any], out: Path) -> MismatchGRPOConfig:
    """Return the trainer's arguments of one run."""
    return MismatchGRPOConfig(
        output_dir=str(out),
        run_name=out.name,
        use_cpu=True,
        bf16=True,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.05,
        vllm_max_model_length=160,
        # Nothing in the loss makes up for the gap, in any run.
        vllm_importance_sampling_correction=False,
        # The one kernel for which a pass with a KV cache and a full pass agree to the last bit: the control needs it.
        model_init_kwargs={"attn_implementation": "eager"},
        per_device_train_batch_size=settings["batch"],
        steps_per_generation=settings["mini_steps"],
        num_generations=8,
        max_completion_length=settings["max_length"],
        learning_rate=settings["learning_rate"],
        lr_scheduler_type="constant",
        max_steps=settings["steps"],
        max_grad_norm=1.0,
        beta=0.0,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=settings["seed"],
        mismatch=settings["block"],
    )


def train(settings: dict[str, Any], out: Path) -> None:
    """Train one run, then evaluate the trainer's own policy, which is the same measure for every engine."""
    config = configuration(settings, out)
    rows = config.max_steps * config.generation_batch_size // config.num_generations
    digits = tuple(settings["digits"])
    kind = Fp8CacheTrainer if settings["engine"] == "fp8_kv" else MismatchGRPOTrainer
    trainer = kind(
        model=settings["model"],
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(make_dataset(rows, digits, seed=1000 + config.seed)),
    )
    trainer.remove_callback(ProgressCallback)
    trainer.remove_callback(PrinterCallback)
    if settings["engine"] == "trainer":
        trainer.vllm_generation.inner.generate = TrainerSampler(trainer, config.seed).generate
    trainer.train()
    problems = make_dataset(settings["eval_prompts"], digits, seed=1)
    prompts = [trainer._tokenizer(row["prompt"])["input_ids"] for row in problems]
    _, completions, *_ = TrainerSampler(trainer, 1).generate(prompts)
    texts = [trainer._tokenizer.decode(row, skip_special_tokens=True) for row in completions]
    scores = reward(texts, [row["a"] for row in problems], [row["b"] for row in problems])
    (out / EVALUATION).write_text(json.dumps({"accuracy": sum(scores) / len(scores)}), encoding="utf-8")


def train_quietly(settings: dict[str, Any], out: Path) -> None:
    """Train in a process of its own, with what is printed kept in the run's folder."""
    be_quiet(out)
    train(settings, out)
