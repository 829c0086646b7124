"""Learning rate against gap on a real engine: learning-rate control on and off, and a control whose gap is zero.

    python -m benchmarks.lr_gap --seeds 5 --steps 100 --out runs/lr_gap

Every run is GRPO by TRL on addition problems, with several optimizer steps per rollout and nothing in the loss that makes up
for the gap. Three engines sample: vLLM in bf16, vLLM with an fp8 KV cache, and, as the control, the trainer's own model in the
trainer's own precision; each at a constant rate, a controlled one, and a constant one of the same mean. Runs that are finished
are not run again. Prints the tables of docs/lr.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import shutil
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.lr_gap.tables import RATES, report
from examples.arithmetic.shipped import shipped_model

ENGINES = ("bf16", "fp8_kv", "trainer")
MULTIPLIERS = (1.0, 0.5, 0.25, 0.125, 0.1)
"""What a run with control goes through, a fifth of its steps each."""


def settings_of(engine: str, rate: str, seed: int, args: argparse.Namespace, model: Path) -> dict[str, Any]:
    """Return what decides a run."""
    block: dict[str, Any] = {"monitor": {"weight_sync": "warn"}}
    if rate == "on":
        block["lr"] = {"period": max(1, args.steps // len(MULTIPLIERS))}
    if engine == "fp8_kv":  # vLLM's CPU build has such a cache for CPUs with AVX-512 alone
        block["precision"] = {"dtype": "bfloat16", "engine_kv_cache": "fp8_e5m2"}
    flat = sum(MULTIPLIERS) / len(MULTIPLIERS) if rate == "flat" else 1.0
    return {
        "engine": engine,
        "seed": seed,
        "steps": args.steps,
        "learning_rate": args.learning_rate * flat,
        "batch": 32,
        "mini_steps": 4,
        "max_length": 96,
        "digits": [2, 6],
        "eval_prompts": 256,
        "model": str(model),
        "block": block,
    }


def run_all(args: argparse.Namespace, model: Path) -> None:
    """Run what is not finished, each run in a process of its own."""
    from benchmarks.lr_gap import run  # not before it is needed: it imports vLLM

    jobs = list(itertools.product(range(args.seeds), args.engines, args.rates))
    bar = tqdm(jobs, desc="runs", unit="run")
    context = multiprocessing.get_context("spawn")
    for seed, engine, rate in bar:
        out = args.out / f"{engine}-{rate}-seed{seed}"
        bar.set_postfix_str(out.name)
        settings = settings_of(engine, rate, seed, args, model)
        known = out / run.SETTINGS
        if known.is_file() and (out / run.EVALUATION).is_file() and json.loads(known.read_text()) == settings:
            continue
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        known.write_text(json.dumps(settings, indent=1), encoding="utf-8")
        process = context.Process(target=run.train_quietly, args=(settings, out))
        process.start()
        process.join()
        if process.exitcode != 0:
            raise SystemExit(f"{out.name} ended with exit code {process.exitcode}; see {out / 'log.txt'}")


def main() -> None:
    """Run what is missing, and print the tables."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lr_gap", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--steps", type=int, default=100, help="optimizer steps, four per rollout (default: %(default)s)"
    )
    parser.add_argument("--learning-rate", type=float, default=3e-4, help="before control (default: %(default)s)")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument(
        "--rates", nargs="+", choices=RATES, default=RATES, help="off, on, or flat: constant at the mean rate of on"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/lr_gap"))
    args = parser.parse_args()
    run_all(args, shipped_model("dense"))
    print(report(args.out, args.engines, args.rates, args.seeds, args.steps))


if __name__ == "__main__":
    main()
