"""One run of TRL's GRPO in float32 with vLLM in bf16, whose weights are rounded to an int4 grid at each update.

vLLM on a CPU runs no int4: each update sends weights that were rounded to that grid, as an engine that stores int4 would hold
them. Model, language, reward and measures are the miniature's.
"""

from __future__ import annotations

import os

# Before vLLM is imported: a small KV cache, and silence where the trainer already reports.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import math
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from datasets import Dataset
from mismatch_ext.adapters.transformers.doctor.changes import weights
from mismatch_ext.adapters.trl import MismatchGRPOConfig, MismatchGRPOTrainer
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, TrainerCallback
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from benchmarks.stability.arms import RealArm
from benchmarks.stability.miniature import END, Language, coarse, on_grid
from benchmarks.stability.train import PROMPT, Curves, base, learned, publish

BITS, STEPS, PROMPTS, SAMPLES, NEW, RATE = 4, 60, 8, 8, 32, 1e-3
LOGGED = {
    "length": "completions/mean_length",
    "stopped": "mismatch/phantom_clip_frac",
    "advantage_gap": "mismatch/advantage_gap",
    "k3": "mismatch/k3_kl",
}
"""What is kept of TRL's log, by the names of the miniature's measures."""


def tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose token n is written "tn"."""
    words = Tokenizer(models.WordLevel({f"t{n}": n for n in range(vocabulary)}, unk_token=f"t{END}"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    end = f"t{END}"
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token=end, pad_token=end, unk_token=end)


def checkpoint(arm: RealArm, seed: int, out: Path) -> tuple[Path, Language]:
    """Write what the run starts from, and return it with its language."""
    model, language, shape = base(512)
    publish(model, arm.published(), torch.Generator().manual_seed(5000 + seed))
    model.generation_config.eos_token_id = END  # type: ignore[union-attr, assignment]
    model.save_pretrained(out)  # type: ignore[operator]
    tokenizer(shape.vocabulary).save_pretrained(out)
    return out, language


class Noting(TrainerCallback):
    """Keeps what a run logs, and ends it when responses are short."""

    def __init__(self) -> None:
        self.curves: Curves = {name: [] for name in LOGGED}

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Keep what a step logged."""
        if "loss" in logs:
            for name, logged in LOGGED.items():
                self.curves[name].append(float(logs.get(logged, math.nan)))
            control.should_training_stop |= learned(self.curves["length"])


def shorter(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Return the reward of each response: minus its length."""
    return [-len(ids) / NEW for ids in completion_ids]


def send_rounded(trainer: MismatchGRPOTrainer) -> None:
    """Let the weights that an engine stores as integers be these integers while they are sent."""
    model, send = trainer.accelerator.unwrap_model(trainer.model), trainer.vllm_generation.sync_weights

    def sync() -> Any:
        coarse_weights = {name: on_grid(w.detach(), BITS) for name, w in model.named_parameters() if coarse(name, w)}
        with weights(model, coarse_weights):
            return send()

    trainer.vllm_generation.sync_weights = sync


def straight_through(module: nn.Linear, x: Tensor) -> Tensor:
    """Compute with the engine's weights, and pass gradients to the masters."""
    weight = module.weight
    return nn.functional.linear(x, weight + (on_grid(weight.detach(), BITS) - weight).detach(), module.bias)


def train(arm: RealArm, seed: int, out: Path, *, steps: int = STEPS) -> Curves:
    """Train one run."""
    folder, language = checkpoint(arm, seed, out / "model")
    rows = language.sample(steps * PROMPTS, PROMPT, torch.Generator().manual_seed(1000 + seed), end=False)
    texts = [" ".join(f"t{n}" for n in row) for row in rows.tolist()]
    config = MismatchGRPOConfig(
        output_dir=str(out),
        use_cpu=True,
        bf16=False,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.05,
        vllm_max_model_length=64,
        model_init_kwargs={"dtype": "float32", "attn_implementation": "eager"},
        per_device_train_batch_size=PROMPTS * SAMPLES,
        num_generations=SAMPLES,
        max_completion_length=NEW,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        adam_beta2=0.99,
        max_steps=steps,
        max_grad_norm=1.0,
        epsilon=0.2,
        loss_type="bnpo",
        beta=0.0,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=seed,
        # The engine's weights are not the trainer's, on purpose.
        mismatch={"correction": {"preset": arm.preset}, "monitor": {"weight_sync": "off", "metrics": "all"}},
    )
    trainer = MismatchGRPOTrainer(
        model=str(folder), reward_funcs=shorter, args=config, train_dataset=Dataset.from_dict({"prompt": texts})
    )
    for kind in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(kind)
    noting = Noting()
    trainer.add_callback(noting)
    send_rounded(trainer)
    if arm.matched:
        for name, module in trainer.accelerator.unwrap_model(trainer.model).named_modules():
            if isinstance(module, nn.Linear) and coarse(name, module.weight):
                module.forward = MethodType(straight_through, module)
    trainer.train()
    return noting.curves
