"""A training step of the real TRL with vLLM and every section on, against stock TRL's, step by step in turn.

Two processes hold a trainer and an engine each. They take turns by single steps, so that a machine that slows down slows
both, and nothing runs beside a step that is timed. A rate of 0 leaves both with the same weights: they sample the
same tokens, which is checked, and so do the same work; the optimizer does all of its own all the same. On a CPU the time is
that of the processor, which other programs do not lengthen as they do a clock's; with a GPU it is the clock's.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from transformers import TrainerCallback

from benchmarks.harness import interval

EVERYTHING: dict[str, Any] = {
    "precision": {"dtype": "bfloat16"},
    "correction": {"preset": "decoupled_geo_rs_token_tis"},
    "kl": {"coef": 0.05},
    "routing": {"mode": "R3"},
    "lr": {},
    "monitor": {},
}
WARM_UP = 2


def now() -> float:
    """Return seconds: this process's processor time on a CPU, or the clock's time if there is a GPU."""
    import torch

    return time.perf_counter() if torch.cuda.is_available() else time.process_time()


class TakesTurns(TrainerCallback):
    """Waits for its turn before each step, and reports what the step took, logging and checks included."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe
        self.began: float | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report the step before, and wait."""
        self._report(state)
        self.pipe.recv()
        self.began = now()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report the last step."""
        self._report(state)

    def _report(self, state: Any) -> None:
        seconds = None if self.began is None else now() - self.began
        logs = next((entry for entry in reversed(state.log_history) if "loss" in entry), {})
        self.pipe.send({"seconds": seconds, "tokens": logs.get("num_tokens"), "reward": logs.get("reward")})


def train(kind: str, model: str, out: str, steps: int, pipe: Connection) -> None:
    """Train in its own process, one step each time it is told to."""
    os.dup2(2, 1)  # standard output is for the result
    with socket.socket() as free:  # accelerate would take the same port for all
        free.bind(("127.0.0.1", 0))
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(free.getsockname()[1])
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
        "output_dir": out, "max_steps": steps, "num_generations": 8,
        "per_device_train_batch_size": 64, "gradient_accumulation_steps": 4,
        "max_completion_length": 96, "learning_rate": 0.0, "beta": 0.05, "bf16": True, "use_cpu": on_cpu,
        "use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.05, "vllm_max_model_length": 160,
        "logging_steps": 1, "save_strategy": "no", "report_to": "none", "gradient_checkpointing": False, "seed": 0,
        "disable_tqdm": True,
    }  # fmt: skip
    rest: dict[str, Any] = {
        "model": model,
        "reward_funcs": reward,
        "train_dataset": Dataset.from_list(make_dataset(steps * 32, FAMILIAR_DIGITS, seed=3)),
        "callbacks": [TakesTurns(pipe)],
    }
    if kind == "ours":
        trainer = MismatchGRPOTrainer(args=MismatchGRPOConfig(**given, mismatch=EVERYTHING), **rest)
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


def run(steps: int = 14, model: str | None = None) -> list[dict[str, Any]]:
    """Return the row of this benchmark; the ratio is the time of the stock step over that with everything on."""
    from examples.arithmetic.shipped import shipped_model

    model = model or str(shipped_model("moe"))
    context = multiprocessing.get_context("spawn")
    pipes, children = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        found: dict[str, list[dict[str, Any]]] = {"theirs": [], "ours": []}
        try:
            for kind in found:
                here, there = context.Pipe()
                child = context.Process(target=train, args=(kind, model, f"{folder}/{kind}", steps, there))
                child.start()
                there.close()
                pipes[kind], children[kind] = here, child
                here.recv()  # it is built and waits for its first turn
            for step in range(steps):
                for kind in ("ours", "theirs") if step % 2 else ("theirs", "ours"):
                    pipes[kind].send("go")
                    found[kind].append(pipes[kind].recv())
        finally:
            for kind, child in children.items():
                pipes[kind].close()  # a process whose partner has failed would wait for ever
                child.join(60)
                if child.is_alive():
                    child.terminate()
    pairs = list(zip(found["ours"], found["theirs"], strict=True))[WARM_UP:]
    assert all(ours["tokens"] == theirs["tokens"] for ours, theirs in pairs), "the two sampled other tokens"
    assert all(ours["reward"] == theirs["reward"] for ours, theirs in pairs), "the two sampled other tokens"
    times = [ours["seconds"] / theirs["seconds"] for ours, theirs in pairs]
    tokens = (pairs[-1][0]["tokens"] - pairs[0][0]["tokens"]) / (len(pairs) - 1)
    return [
        {
            "name": f"a training step of TRL with vLLM, {tokens:.0f} tokens: every section on, R3 and monitor included, vs stock",
            "ours": median(ours["seconds"] for ours, _ in pairs),
            "theirs": median(theirs["seconds"] for _, theirs in pairs),
            "ratio": median(theirs["seconds"] / ours["seconds"] for ours, theirs in pairs),
            "times stock": median(times),
            "95 % of it": interval(times),
            "equal": f"reward and number of tokens of each of {len(pairs)} steps",
        }
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--model", default=None, help="A checkpoint; the example's mixture of experts otherwise.")
    given = parser.parse_args()
    for row in run(given.steps, given.model):
        print(json.dumps(row))
