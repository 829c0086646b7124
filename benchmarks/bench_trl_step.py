"""A training step of the real TRL with vLLM and every section on, against stock TRL's, step by step in turn.

Both sample with top-k, so that a sampling mask has something to leave out; stock TRL scores over the whole vocabulary.
`--without` leaves sections out. The model and its vocabulary are tiny, so what a row or a step costs weighs more here than in a
run: probes of a weight update, records, routes. `python -m benchmarks trl_real` measures a real vocabulary. In a few steps the
batch is scored once more without replay, which the median over the steps leaves out and `of all steps` counts.

A rate of 0 leaves both with the same weights: they sample the same tokens, which is checked, and so do the same work; the
optimizer does all of its own all the same. On a CPU the time is that of the processor, which other programs do not lengthen as
they do a clock's; with a GPU it is the clock's. Other programs slow down a processor that they share, so that pairs of steps
differ more on a loaded machine.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, fields
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import be_quiet, interval
from benchmarks.turns import TakesTurns, take_turns, tokens_per_step

EVERYTHING: dict[str, Any] = {
    "precision": {"dtype": "bfloat16"},
    "correction": {"preset": "decoupled_geo_rs_token_tis"},
    "kl": {"coef": 0.05},
    "routing": {"mode": "R3"},
    "sampling_mask": {},
    "lr": {},
    "monitor": {},
}


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much a comparison does: steps, completions of a step, and tokens of a completion at most."""

    steps: int = 18
    rows: int = 256
    tokens: int = 96


GENERATIONS, PARTS = 8, 4
"""Completions of each prompt, and micro-batches of a step."""


def train(kind: str, model: str, out: str, size: Size, without: Sequence[str], pipe: Connection) -> None:
    """Train in its own process, one step each time it is told to."""
    Path(out).mkdir()
    be_quiet(Path(out))
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import torch
    from datasets import Dataset
    from mismatch_ext.adapters.trl import MismatchGRPOConfig, MismatchGRPOTrainer
    from mismatch_ext.adapters.vllm import update_weights
    from mismatch_ext.patches.trl.engine_arguments import engine_arguments
    from mismatch_ext.patches.vllm.cpu_moe_repack import CPU_MOE_REPACK
    from trl import GRPOConfig, GRPOTrainer

    from examples.arithmetic.task import FAMILIAR_DIGITS, make_dataset, reward
    from mismatch_ext.patching import applied

    on_cpu = not torch.cuda.is_available()
    given = {
        "output_dir": out, "max_steps": size.steps, "num_generations": GENERATIONS,
        "per_device_train_batch_size": size.rows // PARTS, "gradient_accumulation_steps": PARTS,
        "max_completion_length": size.tokens, "learning_rate": 0.0, "beta": 0.05, "bf16": True, "use_cpu": on_cpu,
        "use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.05, "vllm_max_model_length": 160,
        "logging_steps": 1, "save_strategy": "no", "report_to": "none", "gradient_checkpointing": False, "seed": 0,
        "disable_tqdm": True, "top_k": 8,
    }  # fmt: skip
    rest: dict[str, Any] = {
        "model": model,
        "reward_funcs": reward,
        "train_dataset": Dataset.from_list(
            make_dataset(size.steps * size.rows // GENERATIONS, FAMILIAR_DIGITS, seed=3)
        ),
        "callbacks": [TakesTurns(pipe)],
    }
    if kind == "ours":
        block = {name: section for name, section in EVERYTHING.items() if name not in without}
        trainer = MismatchGRPOTrainer(args=MismatchGRPOConfig(**given, mismatch=block), **rest)
    else:
        # On a CPU, stock TRL needs two patches to run: an uncompiled engine, and weight updates that arrive.
        patches = [engine_arguments({"dtype": "bfloat16", "enforce_eager": True}), CPU_MOE_REPACK] if on_cpu else []
        with applied(*patches):
            trainer = GRPOTrainer(args=GRPOConfig(**given), **rest)
        inner = trainer.vllm_generation
        if on_cpu:
            inner.sync_weights = lambda: update_weights(inner.llm, inner._iter_named_params())
    trainer.train()
    pipe.close()
    os._exit(0)  # engine threads may outlive the main one


SMALL = Size()


def run(size: Size = SMALL, model: str | None = None, without: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return a row of a model, by default the example's mixture; the ratio is the time of the stock step over that of ours."""
    from examples.arithmetic.shipped import shipped_model

    return [compared(size, str(model or shipped_model("moe")), without)]


def compared(size: Size, model: str, without: Sequence[str] = (), title: str = "") -> dict[str, Any]:
    """Return the row of one model."""
    import torch
    from transformers import AutoModelForCausalLM

    millions = AutoModelForCausalLM.from_pretrained(model).num_parameters() / 1e6
    with tempfile.TemporaryDirectory() as folder:
        given = {kind: (kind, model, f"{folder}/{kind}", size, without) for kind in ("ours", "theirs")}
        pairs = take_turns(size.steps, train, given)
    same = [[side["learned"][name] for name in ("num_tokens", "reward")] for pair in pairs for side in pair]
    assert same[::2] == same[1::2], "the two sampled other tokens"
    unit = "clock" if torch.cuda.is_available() else "processor"
    seconds = [(ours[unit], theirs[unit]) for ours, theirs in pairs]
    times = [ours / theirs for ours, theirs in seconds]
    sections = " ".join(["every section", *(f"but {name}" for name in without)])
    return {
        "name": f"a training step of TRL with vLLM, {title}{millions:.1f} million parameters, "
        f"{tokens_per_step(pairs):.0f} tokens: {sections} on vs stock",
        "ours": median(ours for ours, _ in seconds),
        "theirs": median(theirs for _, theirs in seconds),
        "ratio": median(theirs / ours for ours, theirs in seconds),
        "times stock": median(times),
        "95 % of it": interval(times),
        "of all steps": sum(ours for ours, _ in seconds) / sum(theirs for _, theirs in seconds),
        "equal": f"reward and number of tokens of each of {len(pairs)} steps",
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for field in fields(Size):
        parser.add_argument(f"--{field.name}", type=int, default=field.default)
    parser.add_argument("--model", default=None, help="A checkpoint; otherwise the example's mixture of experts.")
    parser.add_argument("--without", nargs="*", choices=EVERYTHING, default=(), help="Sections to leave out.")
    given = parser.parse_args()
    asked = Size(steps=given.steps, rows=given.rows, tokens=given.tokens)
    for row in run(asked, given.model, given.without):
        print(json.dumps(row))
