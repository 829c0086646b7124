"""One run of TRL's AsyncGRPO with a `vllm serve`."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from mismatch_ext.adapters.trl.async_grpo import MismatchAsyncGRPOConfig, MismatchAsyncGRPOTrainer
from transformers import AutoTokenizer

from benchmarks.gpu.miniature import END, Language
from benchmarks.stability.async_arms import STEPS, AsyncArm
from benchmarks.stability.real_run import tokenizer
from benchmarks.stability.table import LONG
from benchmarks.stability.train import PROMPT, base
from benchmarks.stability.watching import Curves, Shorter
from examples.trl_async import on_cpu

PROMPTS, SAMPLES, RATE = 8, 8, 1e-3
LOGGED = {
    "length": "reward",
    "stopped": "clip_ratio/region_mean",
    "staleness": "mismatch/staleness_mean",
    "k3": "mismatch/k3_kl",
    "numerics": "mismatch/numerics/k3_kl",
}
"""What is kept of the trainer's log; the length comes of the reward."""


def checkpoint(out: Path) -> None:
    """Write what every run starts from, published in bf16."""
    model, _, shape = base(512)
    model.generation_config.eos_token_id = END  # type: ignore[union-attr, assignment]
    model.to(torch.bfloat16).float().save_pretrained(out)  # type: ignore[operator]
    words = tokenizer(shape.vocabulary)
    words.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    words.save_pretrained(out)


def train(arm: AsyncArm, seed: int, model: Path, server: str, out: Path) -> dict[str, list[float]]:
    """Train one run."""
    language = Language(512, "cpu")
    rows = language.sample(STEPS * PROMPTS, PROMPT, torch.Generator().manual_seed(1000 + seed), end=False)
    texts = [" ".join(f"t{n}" for n in row) for row in rows.tolist()]
    block: dict[str, Any] = {}
    block |= {} if arm.preset is None else {"correction": {"preset": arm.preset}}
    block |= {} if arm.precision is None else {"precision": {"dtype": arm.precision}}
    config = MismatchAsyncGRPOConfig(
        output_dir=str(out),
        use_cpu=True,
        bf16=False,
        vllm_server_base_url=server,
        vllm_server_timeout=60.0,
        token_budget=0,
        per_device_train_batch_size=PROMPTS * SAMPLES,
        num_generations=SAMPLES,
        max_completion_length=LONG,
        max_inflight_tasks=PROMPTS * SAMPLES,
        queue_maxsize=PROMPTS * SAMPLES,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        adam_beta2=0.99,
        max_steps=STEPS,
        max_grad_norm=1.0,
        epsilon=0.2,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=seed,
        mismatch=block,
    )
    words = AutoTokenizer.from_pretrained(model)
    content = {"type": "string", "x-regex": r"^(.*)$"}
    words.response_schema = {"type": "object", "properties": {"role": {"const": "assistant"}, "content": content}}
    kept = Curves(LOGGED, LONG / 2, unit=-1 / LONG)
    with ExitStack() as stack:
        stack.enter_context(on_cpu())
        trainer = MismatchAsyncGRPOTrainer(
            model=str(model),
            reward_funcs=Shorter(LONG),
            args=config,
            train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in texts]}),
            processing_class=words,
            callbacks=[kept],
        )
        trainer.train()
    return kept.curves
