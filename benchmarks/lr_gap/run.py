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

import torch
from datasets import Dataset
from mismatch_ext.adapters.trl import MismatchGRPOConfig, MismatchGRPOTrainer
from torch import Tensor
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from benchmarks.harness import be_quiet
from examples.arithmetic.task import make_dataset, reward

SETTINGS, EVALUATION = "settings.json", "evaluation.json"
"""A folder with the second file holds a finished run."""


class TrainerSampler:
    """The control without a mismatch: stands in for the `generate` of TRL's vLLM wrapper, and samples by the trainer's own model.

    The forward pass is the trainer's: same weights, same autocast, same left padding. With eager attention a pass with a KV
    cache gives the logits of TRL's scoring pass bit for bit, but for a few tokens in a run, so what is left of the gap is the
    float32 rounding of log-softmax. The run measures that gap like any other.

    Args:
        trainer: The GRPOTrainer.
        seed: Seed of the random numbers, which are drawn apart from the trainer's.
    """

    def __init__(self, trainer: Any, seed: int) -> None:
        self.trainer = trainer
        self.generator = torch.Generator().manual_seed(seed)
        self.eos, self.pad = trainer._tokenizer.eos_token_id, trainer._tokenizer.pad_token_id

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Sample one completion per prompt; returns what TRL's `VLLMGeneration.generate` returns."""
        width = max(map(len, prompts))
        ids = torch.tensor([[self.pad] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        rows, cache = torch.arange(len(prompts)), None
        tokens: list[list[int]] = [[] for _ in prompts]
        logprobs: list[list[float]] = [[] for _ in prompts]
        for _ in range(self.trainer.args.max_completion_length):
            with self.trainer.accelerator.autocast():
                output = model(
                    input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, logits_to_keep=1
                )
            cache = output.past_key_values
            drawn, logprob = self._draw(output.logits[:, -1])
            for row, token, value in zip(rows.tolist(), drawn.tolist(), logprob.tolist(), strict=True):
                tokens[row].append(token)
                logprobs[row].append(value)
            # A row's logits do not depend on the others, so those that are finished can leave.
            (going,) = (drawn != self.eos).nonzero(as_tuple=True)
            if len(going) == 0:
                break
            if len(going) < len(rows):
                cache.batch_select_indices(going)
            rows, ids = rows[going], drawn[going, None]
            mask = torch.cat([mask[going], torch.ones_like(ids)], dim=1)
        return prompts, tokens, [[[x] for x in row] for row in logprobs], [[[x] for x in row] for row in tokens]

    def _draw(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        logp = torch.log_softmax(logits.float() / self.trainer.temperature, dim=-1)
        token = torch.multinomial(logp.exp(), 1, generator=self.generator)
        return token[:, 0], logp.gather(1, token)[:, 0]


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
    trainer = MismatchGRPOTrainer(
        model=settings["model"],
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(make_dataset(rows, digits, seed=1000 + config.seed)),
    )
    trainer.remove_callback(ProgressCallback)
    trainer.remove_callback(PrinterCallback)
    if settings["engine"] == "trainer":
        trainer.mm.checked.plain_generate = TrainerSampler(trainer, config.seed).generate
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
