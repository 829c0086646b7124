"""Your own training loop with the whole `mismatch:` block: a model, an optimizer, and vLLM or SGLang.

    python examples/loop.py --steps 5
    python examples/loop.py --engine sglang --steps 5

A mixture of experts learns to add, in float16 on both sides (`precision`), its experts replayed (`routing`), what is left of the
gap weighed (`correction`), kept near the model that it began as (`kl`), at a rate that is led by the length of its responses
(`lr`). Every weight update is verified, alarms watch the run (`monitor`), and `mismatch-ext report` shows it. The loop is the
same for any block: `--mismatch '{}'` measures only.
"""

from __future__ import annotations

import os

# Set before an engine is imported: a small KV cache for vLLM in this process, one thread for each of SGLang's kernels.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import argparse
import importlib
import json
import sys
from pathlib import Path

# When run as a file, Python would look for modules only in examples/.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from mismatch_ext.adapters.transformers import TrainedModel
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, get_constant_schedule_with_warmup

from examples.arithmetic.shipped import shipped_model
from examples.arithmetic.task import FAMILIAR_DIGITS, make_dataset, reward
from mismatch_ext import MismatchConfig, Run, SamplingSettings

BLOCK = {
    "routing": {"mode": "R3", "measured": 1.0},
    "correction": {"preset": "tis"},
    "kl": {"coef": 0.02},
    "lr": {},
    "monitor": {},
}
SAMPLES, LEARNING_RATE, CLIP = 8, 5e-5, 0.2
ARGUMENTS = {"vllm": {"max_model_len": 160, "seed": 0}, "sglang": {"random_seed": 0}}
SHOWN = (
    "reward",
    "length",
    "learning_rate",
    "mismatch/native/k3_kl",
    "mismatch/k3_kl",
    "mismatch/routing/set_mismatch_frac",
)


def said(step: int, metrics: dict[str, float], weights: str) -> str:
    """Return a line about a step."""
    shown = ", ".join(f"{name.removeprefix('mismatch/')} {metrics[name]:.3g}" for name in SHOWN if name in metrics)
    return f"step {step}: {shown}, weights {weights}"


def main() -> None:
    """Train by a clipped policy gradient with the mean of each prompt's samples as baseline."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("vllm", "sglang"), default="vllm")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=16, help="Prompts per step.")
    parser.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), default="float16", help="Of both sides.")
    parser.add_argument("--mismatch", type=json.loads, help="Another block, as JSON.")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/loop"))
    parser.add_argument("--model_name_or_path", help="Folder of another model.")
    options = parser.parse_args()
    block = MismatchConfig.parse(
        BLOCK | {"precision": {"dtype": options.dtype}} if options.mismatch is None else options.mismatch
    )
    path = options.model_name_or_path or str(shipped_model("moe"))
    tokenizer = AutoTokenizer.from_pretrained(path)
    engine = importlib.import_module(f"mismatch_ext.adapters.{options.engine}")
    limits = {"max_new_tokens": 112, "n": SAMPLES, "stop_token_ids": [tokenizer.eos_token_id]}
    rollout = engine.Rollout.launch(path, block, SamplingSettings(), **limits, **ARGUMENTS[options.engine])
    rows = make_dataset(options.prompts * options.steps, FAMILIAR_DIGITS, seed=1000)
    batches = [rows[first : first + options.prompts] for first in range(0, len(rows), options.prompts)]

    # loop
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, base = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device) for _ in range(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    scheduler = get_constant_schedule_with_warmup(optimizer, 0)
    trainer = TrainedModel(model, optimizer, scheduler, tokenizer=tokenizer, reference=base)
    with Run(block, trainer, rollout, options.output_dir).start() as run:
        for problems in tqdm(batches, unit="step"):
            batch = run.batch(rollout.generate([tokenizer(row["prompt"]).input_ids for row in problems]))
            with torch.no_grad():
                old, ref = run.score(batch), run.reference(batch)
            run.measure(batch, old=old, reference=ref)
            weights = run.correct(batch, old).as_multiplier()

            texts = tokenizer.batch_decode([record.response_ids for record in batch.records], skip_special_tokens=True)
            a, b = ([row[name] for row in problems for _ in range(SAMPLES)] for name in ("a", "b"))
            rewards = torch.tensor(reward(texts, a, b), device=device).view(-1, SAMPLES)
            advantages = (rewards - rewards.mean(1, keepdim=True)).view(-1, 1)

            logprobs = run.score(batch)
            ratio = (logprobs - old).exp()
            gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
            loss = (run.kl(batch, logprobs=logprobs, reference=ref) - weights * gain)[batch.response_mask].mean()
            run.step(loss, max_norm=1.0)
            verdict = run.send()
            log = run.log(reward=rewards)
            tqdm.write(said(run.steps, log.metrics, "not checked" if verdict is None else verdict.status))
            if log.stop:
                break
    # end of loop
    rollout.shutdown()


if __name__ == "__main__":
    main()
