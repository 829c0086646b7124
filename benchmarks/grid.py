"""What an engine of a coarser dtype gets of a trainer's updates: TRL and vLLM, `python -m benchmarks.grid --out runs/grid`.

The example's dense model is stored in bfloat16, as published checkpoints are. One arm trains it in float32 at a small rate, and
the others change one thing each. At the end the doctor compares vLLM in bfloat16 with a trainer that holds the trained weights.
Every run is a process of its own, and one that is written is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

SEEDS, STEPS, PROMPTS, NEW, RATE, BF16 = 3, 32, 4, 24, 1e-5, "bfloat16"
ARMS: dict[str, dict[str, Any]] = {
    "float32 trainer, bf16 engine": {},
    "the same at 100 times the rate": {"learning_rate": 100 * RATE},
    "float32 weights under bf16 autocast, bf16 engine": {"bf16": True},
    "bf16 trainer, bf16 engine": {"model_init_kwargs": {"dtype": BF16}},
    "float32 trainer, float32 engine": {"mismatch": {"precision": {"dtype": "float32"}}},
}
EXAMINED = {0: "float32", 2: BF16}  # arms that the doctor examines, and what their trainers compute in
SHARE = "mismatch/engine_moved_frac"


def graded(completions: list[str], **_: Any) -> list[float]:
    return [sum(c in "02468" for c in text) / max(len(text), 1) for text in completions]


def train(arm: str, seed: int, out: Path) -> None:
    """Train one run, and write what its log and its weights say."""
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    import torch
    from datasets import Dataset
    from mismatch_ext.adapters.trl import MismatchGRPOConfig, MismatchGRPOTrainer
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from examples.arithmetic.shipped import shipped_model
    from examples.arithmetic.task import make_dataset
    from mismatch_ext.log_reading import read_run
    from mismatch_ext.precision.grid import EVENT, grid_sums

    source, stored = shipped_model("dense"), out / "model"
    AutoModelForCausalLM.from_pretrained(source, dtype=BF16).save_pretrained(stored)
    AutoTokenizer.from_pretrained(source).save_pretrained(stored)
    given = {
        "output_dir": str(out), "max_steps": STEPS, "per_device_train_batch_size": 8 * PROMPTS, "num_generations": 8,
        "max_completion_length": NEW, "learning_rate": RATE, "lr_scheduler_type": "constant", "beta": 0.0, "bf16": False,
        "use_cpu": True, "use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.05,
        "vllm_max_model_length": 64, "logging_steps": 1, "save_strategy": "no", "report_to": "none", "seed": seed,
        "gradient_checkpointing": False, "disable_tqdm": True, "model_init_kwargs": {"dtype": "float32"}, "mismatch": {},
    } | ARMS[arm]  # fmt: skip
    data, args = Dataset.from_list(make_dataset(STEPS * PROMPTS, seed=seed)), MismatchGRPOConfig(**given)
    trainer = MismatchGRPOTrainer(str(stored), graded, args=args, train_dataset=data)
    run: Any = trainer.mm
    before = torch.cat([weight.float().flatten() for _, weight in run.held()])
    trainer.train()
    after = torch.cat([weight.float().flatten() for _, weight in run.held()])
    sums = grid_sums(before, after, run.compute_dtype, run.readings["engine"].model_dtype)
    trainer.save_model(str(out / "trained"))
    (out / "prompts.txt").write_text("\n".join(data["prompt"]), encoding="utf-8")
    logs, events = [e for e in trainer.state.log_history if "loss" in e], read_run(run.log.run_dir).events
    result = {
        "warning": [event.step for event in events if event.name == EVENT],
        "said": [event.message for event in events if event.name == EVENT],
        "alarm": [event.step for event in events if event.name == "alarm" and f"{SHARE} is" in event.message],
        "share": [entry[SHARE] for entry in logs if SHARE in entry],
        "moved": float(sums["moved"] / sums["changed"]),
        "gap": [entry["mismatch/logp_abs_diff_mean"] for entry in logs],
    }
    (out / "result.json").write_text(json.dumps(result, indent=1), encoding="utf-8")


def examined(folder: Path, trainer_dtype: str) -> str:
    """Return the causes that the doctor names of trained weights, or its verdict, with the trainer's error."""
    if not (folder / "doctor.json").is_file():
        sides = ("--model", folder / "trained", "--dtype", BF16, "--trainer-dtype", trainer_dtype)
        asked = ("--prompts", folder / "prompts.txt", "--max-tokens", NEW, "--quick", "--out", folder)
        python("mismatch_ext", "doctor", *sides, *asked)
    found = json.loads((folder / "doctor.json").read_text(encoding="utf-8"))
    return f"{', '.join(cause['key'] for cause in found['causes']) or found['verdict']} {found['trainer_ratio']:.1f}"


def python(*words: object) -> None:
    """Run a module; the doctor's status is its verdict."""
    subprocess.run([sys.executable, "-m", *map(str, words)], stdout=subprocess.DEVNULL, check="doctor" not in words)


def row(arm: str, runs: Sequence[dict[str, Any]], doctor: Sequence[str]) -> str:
    """Return an arm's row: what was said, by seed, and means over seeds; a gap is that of the first or last 4 steps."""
    warned = " ".join("yes" if run["warning"] else "no" for run in runs)
    alarm = " ".join(str(run["alarm"][0]) if run["alarm"] else "none" for run in runs)
    share = f"{mean(mean(run['share']) for run in runs):.1%}" if runs[0]["share"] else "not watched"
    moved = f"{mean(run['moved'] for run in runs):.1%}"
    gap = " to ".join(f"{mean(mean(run['gap'][part]) for run in runs):.1e}" for part in (slice(4), slice(-4, None)))
    return f"| {' | '.join((arm, warned, alarm, share, moved, gap, ', '.join(doctor) or 'not asked'))} |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/grid"))
    parser.add_argument("--one", nargs=2, type=int, metavar=("ARM", "SEED"), help="one run alone, by the arm's number")
    given = parser.parse_args()
    if given.one is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        train([*ARMS][given.one[0]], given.one[1], given.out)
        os._exit(0)  # engine threads may outlive the main one
    print("| arm | warned | alarm at step | moved, a step | moved in all | gap, nats | doctor, trainer's error |")
    print("|---" * 7 + "|")
    for number, arm in enumerate(ARMS):
        folders = [given.out / f"{number}-{seed}" for seed in range(SEEDS)]
        for seed, folder in enumerate(folders):
            if not (folder / "result.json").is_file():
                python("benchmarks.grid", "--out", folder, "--one", number, seed)
        doctor = [examined(folder, EXAMINED[number]) for folder in folders if number in EXAMINED]
        print(row(arm, [json.loads((folder / "result.json").read_text()) for folder in folders], doctor), flush=True)
    warned, named = (json.loads((given.out / "0-0" / name).read_text()) for name in ("result.json", "doctor.json"))
    print("", "The first run warned:", *warned["said"], sep="\n")
    print("", "The doctor said:", *(cause["said"] for cause in named["causes"]), sep="\n")
