"""A run of LoRA whose engine never gets the adapter, for `mismatch-ext doctor` to look at.

    python -m examples.doctor.lora --out runs/lora

trains an adapter of the shipped dense model, and keeps it at step 10 and at step 20. At step 20 vLLM samples, and serves the base
model alone, as a server does whose requests name the base and not the adapter. What it sampled is logged in rollouts.jsonl.
"""

from __future__ import annotations

import os

# Before vLLM is imported: a small KV cache, silence, and one thread, which is faster for a model of this size.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import random
from pathlib import Path
from typing import Any

import peft
import torch
from mismatch_ext.adapters.vllm import Rollout
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from examples.arithmetic.pretrain import IGNORED, draw_demonstrations, pack
from examples.arithmetic.recipe import RECIPES
from examples.arithmetic.shipped import FOLDER
from examples.arithmetic.task import make_dataset
from examples.arithmetic.tokenizer import EOS_ID, encode
from mismatch_ext import MismatchConfig, SamplingSettings, write_rollouts

BASE = Path(os.path.relpath(FOLDER / "dense"))  # an adapter keeps the path of its base model
STEPS, KEPT, BATCH, LEARNING_RATE = 20, (10, 20), 32, 3e-3
ROW_LENGTH, MAX_NEW_TOKENS, RESPONSES = 128, 96, 128


def trained(out: Path) -> None:
    """Train the adapter on demonstrations, and keep it where TRL would."""
    torch.manual_seed(0)
    rng = random.Random(0)
    asked = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
    model: Any = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32), asked)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)
    for step in range(1, STEPS + 1):
        batch = pack(draw_demonstrations(rng, RECIPES["dense"], BATCH), ROW_LENGTH)
        logits = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
        cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in KEPT:
            model.save_pretrained(out / f"checkpoint-{step}")


def logged(out: Path) -> Path:
    """Sample with an engine that serves the base model, and log what it says."""
    limits: dict[str, Any] = {"max_new_tokens": MAX_NEW_TOKENS, "stop_token_ids": [EOS_ID]}
    rollout = Rollout.launch(
        str(BASE), MismatchConfig.parse({"precision": {"dtype": "bfloat16"}}), SamplingSettings(), **limits,
        max_model_len=160, seed=0,
    )  # fmt: skip
    path = out / "rollouts.jsonl"
    write_rollouts(rollout.generate([encode(row["prompt"]) for row in make_dataset(RESPONSES, seed=3000)]), path)
    rollout.shutdown()
    return path


def main() -> None:
    """Train, sample, and say where everything is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/lora"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    trained(options.out)
    print(f"{options.out}/checkpoint-{STEPS}: the adapter that the trainer holds")
    print(f"{logged(options.out)}: what the engine sampled, and the log-probabilities that it reported")


if __name__ == "__main__":
    main()
