"""Score centering on a real model: GRPO on SmolLM2-135M-Instruct, with an engine whose linear layers are rounded to fp8.

    python -m examples.real_centering                                   # four arms, two seeds, 6 steps each
    python -m examples.real_centering --record evidence/real_centering.json

Trainer and vLLM compute in float32 in one process. At each weight update the engine gets weights that were rounded to fp8 (e4m3,
a scale for each row), so that the two policies differ in the same direction at every step, and by nothing else. The arms are no
correction, TIS, score centering, and both. All of them measure `mismatch/sampler_bias`. The task, the reward and the prompts are
those of `examples/real_learning.py`: sums of two numbers from 0 to 10, with answers of at most 8 tokens. Runs with one seed have
the same prompts in the same order.

`runs/real_centering` has a folder for each run. The next call leaves out the runs that have been trained.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

# When run as a file, Python would look for modules only in examples/.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import examples.script as shared  # first, because it sets what vLLM reads when it is imported

# isort: split
import torch
from mismatch_ext.adapters.transformers.doctor.changes import weights
from mismatch_ext.adapters.trl import MismatchGRPOConfig, MismatchGRPOTrainer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.harness import measured_on
from benchmarks.stability.miniature import coarse
from examples import chat, smollm2
from mismatch_ext import read_run
from tests.rendezvous import rendezvous

WORK = Path("runs/real_centering")
STEPS, SEEDS, COMPLETIONS, SAMPLES, TOP_K = 6, (0, 1), 16, 8, 128
LARGEST = torch.finfo(torch.float8_e4m3fn).max
ARMS: dict[str, dict[str, Any]] = {
    "none": {"preset": "disabled", "centering": {"top_k": TOP_K, "only_measured": True}},
    "tis": {"preset": "tis", "centering": {"top_k": TOP_K, "only_measured": True}},
    "centering": {"centering": {"top_k": TOP_K}},
    "centering + tis": {"preset": "tis", "centering": {"top_k": TOP_K}},
}
"""The `correction` section of each arm."""
SERIES = {
    "sampler_bias": "mismatch/sampler_bias",
    "gap": "mismatch/logp_abs_diff_mean",
    "k3": "mismatch/k3_kl",
    "reward": "reward",
    "right": "rewards/reward/mean",
    "length": "completions/mean_length",
    "grad_norm": "grad_norm",
    "seconds": "step_time",
}
"""What is recorded of each step, by the name of the metric."""


def as_fp8(weight: Tensor) -> Tensor:
    """Return a matrix rounded to fp8 (e4m3) with a scale for each row, in its own dtype."""
    scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / LARGEST
    return (weight / scale).to(torch.float8_e4m3fn).to(weight.dtype) * scale


def send_rounded(trainer: Any) -> None:
    """Let the engine get the weights of linear layers rounded to fp8, at each update."""
    model, send = trainer.accelerator.unwrap_model(trainer.model), trainer.vllm_generation.sync_weights

    def sync() -> Any:
        rounded = {name: as_fp8(w.detach()) for name, w in model.named_parameters() if coarse(name, w)}
        with weights(model, rounded):
            return send()

    trainer.vllm_generation.sync_weights = sync


def train(arm: str, seed: int, folder: Path, steps: int) -> None:
    """Train one run in this process."""
    config = MismatchGRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.25,
        vllm_max_model_length=128,
        per_device_train_batch_size=COMPLETIONS,
        num_generations=SAMPLES,
        max_completion_length=8,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        max_steps=steps,
        beta=0.0,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=seed,
        reward_weights=[1.0, 0.0],
        mismatch={
            "precision": {"dtype": "float32"},
            "correction": ARMS[arm],
            # The engine's weights are not the trainer's, on purpose.
            "monitor": {"weight_sync": "off", "metrics": "all", "run_dir": str(folder)},
        },
    )
    trainer = MismatchGRPOTrainer(
        model=str(smollm2.unpack()),
        reward_funcs=[chat.nearness, chat.reward],
        args=config,
        train_dataset=chat.sums(steps * COMPLETIONS // SAMPLES, seed),
    )
    send_rounded(trainer)
    trainer.train()
    shared.end_engine(trainer)


def series(folder: Path) -> dict[str, list[float | None]]:
    """Return what each step of a run has measured; empty lists before the first step."""
    if not (folder / "metrics-000.jsonl").is_file():
        return {name: [] for name in SERIES}
    steps = [record.metrics for record in read_run(folder).steps if record.split == "train"]
    return {name: [step.get(metric) for step in steps] for name, metric in SERIES.items()}


def figures(arm: str, seed: int, folder: Path, steps: int) -> dict[str, Any]:
    """Return a run's row of the record, of so many steps: means over the first and the last half, and each step's figures."""
    found = {name: values[:steps] for name, values in series(folder).items()}
    halves = {
        name: [fmean(known) for part in (values[: steps // 2], values[steps // 2 :]) if (known := _known(part))]
        for name, values in found.items()
    }
    shortened = {name: [None if x is None else float(f"{x:.4g}") for x in values] for name, values in found.items()}
    return {
        "arm": arm,
        "seed": seed,
        "steps": steps,
        "halves": halves,
        "seconds": median(_known(found["seconds"])),
        "series": shortened,
    }


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def print_table(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print the rows for a person."""
    table = Table(title="GRPO on sums, SmolLM2-135M-Instruct, engine rounded to fp8: first half → second half")
    for at, heading in enumerate(("run", "steps", "sampler bias", "mean|Δlogp|", "k3", "reward", "right", "s a step")):
        table.add_column(heading, justify="right" if at else "left")
    for row in rows:
        halves = row["halves"]
        small = [" → ".join(f"{value:.4f}" for value in halves[name]) for name in ("sampler_bias", "gap", "k3")]
        large = [" → ".join(f"{value:.2f}" for value in halves[name]) for name in ("reward", "right")]
        table.add_row(f"{row['arm']}, seed {row['seed']}", str(row["steps"]), *small, *large, f"{row['seconds']:.0f}")
    console.print(table)


def record(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Write rows with what they were measured on, in the place of older ones of the same arms and seeds."""
    found = json.loads(file.read_text(encoding="utf-8"))["figures"] if file.is_file() else []
    new = {(row["arm"], row["seed"]) for row in rows}
    kept = [row for row in found if (row["arm"], row["seed"]) not in new]
    figures = sorted([*kept, *({**row, "measured": measured_on()} for row in rows)], key=lambda row: row["seed"])
    document = {"command": "python -m examples.real_centering", "figures": figures}
    file.write_text(json.dumps(document, allow_nan=False, separators=(",", ":")) + "\n", encoding="utf-8")


def main() -> None:
    """Train the runs that are asked for, as far as they have not been trained, and print what all of them show."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS, help=f"GRPO steps of each run (default: {STEPS})")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="corrections (default: all)")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS), help="runs of each arm (default: 0 1)")
    parser.add_argument("--out", type=Path, default=WORK, help=f"folder of the runs (default: {WORK})")
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="write the runs of this call to this file, beside others"
    )
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # one run, in this process
    arguments = parser.parse_args()
    runs = [
        (arm, seed, arguments.out / f"{arm.replace(' + ', '-')}-{seed}")
        for seed in arguments.seeds
        for arm in arguments.arms
    ]
    if arguments.here:
        train(*runs[0], arguments.steps)
        return
    console = Console()
    for number, (arm, seed, folder) in enumerate(runs, 1):
        console.rule(f"[{number}/{len(runs)}] {arm}, seed {seed}")
        if len(series(folder)["reward"]) < arguments.steps:
            command = [sys.executable, "-m", "examples.real_centering", "--here", "--arms", arm, "--seeds", str(seed)]
            command += ["--steps", str(arguments.steps), "--out", str(arguments.out)]
            subprocess.run(command, check=True, env={**os.environ, **rendezvous()})
    rows = [figures(arm, seed, folder, arguments.steps) for arm, seed, folder in runs]
    print_table(rows, console)
    if arguments.record is not None:
        record(rows, arguments.record)


if __name__ == "__main__":
    main()
