"""The alarm on the growth of the gap, in TRL with vLLM: `python -m benchmarks.quantised.growth`.

At each update the engine is sent the trainer's weights with a multiple of int4's rounding error. The multiple is the same at each
update, or grows tenfold in 48 steps, and k3 by its square or more; verl's pull request #7519 saw 0.0100 become 0.0313 in 32.
"""

from __future__ import annotations

import os

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import argparse
import json
import subprocess
import sys
import warnings
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from datasets import Dataset
from mismatch_ext.adapters.transformers.doctor.changes import int4, quantized, weights
from mismatch_ext.adapters.trl import MismatchGRPOConfig, MismatchGRPOTrainer
from torch import nn

from benchmarks.stability.watching import sent_within
from examples.arithmetic.shipped import FOLDER
from examples.arithmetic.task import make_dataset
from mismatch_ext.log_reading import read_run

STEPS, PART, GROUP = 32, 2.0, 32
ARMS = {"constant": 1.0, "growing": 10 ** (0.5 / 24)}
"""Factor on the error from one update to the next; k3 grows by its square."""
ALARM = "mismatch/k3_growth_low"


def off_by(model: nn.Module, part: float) -> AbstractContextManager[None]:
    """Move linear layers' weights towards int4, and beyond it."""
    own = dict(model.named_parameters())
    return weights(model, {n: own[n].detach().lerp(w, part) for n, w in quantized(model, int4(GROUP)).items()})


def even(completions: list[str], **_: Any) -> list[float]:
    """Reward that varies between completions."""
    return [sum(c in "02468" for c in text) / max(len(text), 1) for text in completions]


def train(arm: str, out: Path) -> None:
    """Train one run; the rate is so small that the policy stays, and with it what an error of the weights does."""
    config = MismatchGRPOConfig(
        output_dir=str(out),
        use_cpu=True,
        bf16=False,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.05,
        vllm_max_model_length=64,
        model_init_kwargs={"dtype": "float32"},
        per_device_train_batch_size=64,
        num_generations=4,
        max_completion_length=24,
        learning_rate=1e-6,
        max_steps=STEPS,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        gradient_checkpointing=False,
        beta=0.0,
        seed=0,
        # The engine's weights are not the trainer's, on purpose.
        mismatch={"precision": {"dtype": "float32"}, "monitor": {"weight_sync": "off"}},
    )
    rows = Dataset.from_list(make_dataset(16 * STEPS, seed=5))
    trainer = MismatchGRPOTrainer(model=str(FOLDER / "dense"), reward_funcs=even, args=config, train_dataset=rows)
    sent_within(trainer, lambda model: off_by(model, PART * ARMS[arm] ** trainer.state.global_step))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train()


def read(out: Path) -> dict[str, Any]:
    """Return a run's gap at its first and last eight steps, its growth, and when its alarm was raised."""
    run = read_run(out / "mismatch")
    gaps = run.series("mismatch/k3_kl")[1]
    low = run.series(ALARM)[1]
    raised = [event.step for event in run.events if event.name == "alarm" and (event.data or {}).get("metric") == ALARM]
    return {
        "steps": len(gaps),
        "k3, first eight steps": sum(gaps[:8]) / 8,
        "k3, last eight steps": sum(gaps[-8:]) / 8,
        "growth at the end": run.series("mismatch/k3_growth")[1][-1],
        "its lower end": low[-1],
        "largest lower end": max(low),
        "alarm raised at step": raised[0] if raised else "never",
    }


def main() -> None:
    """Train both runs, each in a process of its own, and print what their alarms did."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quantised.growth", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/quantised_growth"), help="folder of the runs")
    parser.add_argument("--arm", choices=ARMS, help="train this run alone, in this process")
    options = parser.parse_args()
    if options.arm:
        train(options.arm, options.out / options.arm)
        return
    found = {}
    for arm in ARMS:
        command = [sys.executable, "-m", "benchmarks.quantised.growth", "--arm", arm, "--out", str(options.out)]
        subprocess.run(command, check=True, stdout=sys.stderr)
        found[arm] = read(options.out / arm)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
