"""Does a real model learn alike in bf16 and in float32? GRPO on SmolLM2-135M-Instruct, the same prompts in both dtypes.

    python -m examples.real_learning                                   # 300 steps in both arms, two seeds each
    python -m examples.real_learning --steps 20                        # a short one
    python -m examples.real_learning --steps 60                        # goes on from there
    python -m examples.real_learning --steps 60 --record evidence/real_learning.json   # writes what docs/real.md shows, too

Both arms have TRL's trainer and vLLM in one process, each with one dtype on both sides; float32 is the control of bf16. The task
is a sum of two numbers from 0 to 10 (`examples/chat.py`). The reward is graded: 1 for the right number, a tenth less for each
unit that it is off, 0 for ten and more or for no number. Right answers are counted as well. Runs with one seed get the same
prompts in the same order, and another seed other ones. TRL gives vLLM the same seed in all of them, so that equal prompts would
give equal runs. What two float32 runs differ by is chance and prompts; the dtypes' difference is compared with that. There are
121 such sums, so that a long run meets each of them again.

`runs/real_learning` has a folder for each run, with its last checkpoint (1.6 GB). The next call leaves out what has been trained
already, and goes on from the checkpoint of what has not. `make real` installs what it needs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

# When run as a file, Python would look for modules only in examples/.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.table import Table

from benchmarks.harness import measured_on, of_the_mean
from examples import smollm2
from mismatch_ext import read_run
from tests.rendezvous import rendezvous

WORK = Path("runs/real_learning")
STEPS = 300
SEEDS = (0, 1)
ARMS = {"bf16": "bfloat16", "float32": "float32"}
"""The dtype of both sides, by the arm's name."""
COMPLETIONS = 16
SAVED_EVERY = 10
LONGEST_WINDOW = 50
"""Most steps that are one figure of the table, at the begin and at the end of a run."""
SERIES = {
    "reward": "reward",
    "right": "rewards/reward/mean",
    "length": "completions/mean_length",
    "gap": "mismatch/logp_abs_diff_mean",
    "k3": "mismatch/k3_kl",
    "weight_check": "mismatch/weight_sync_gap",
    "reached_engine": "mismatch/engine_moved_frac",
    "seconds": "step_time",
}
"""What is recorded of each step, by the name of the metric."""

Series = dict[str, list[float | None]]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training.

    Args:
        arm: A name of `ARMS`.
        seed: Seed of the prompts.
        folder: Where it writes.
    """

    arm: str
    seed: int
    folder: Path

    def series(self) -> Series:
        """Return what each step has measured so far; empty lists before the first step."""
        if not (self.folder / "metrics-000.jsonl").is_file():
            return {name: [] for name in SERIES}
        steps = [record.metrics for record in read_run(self.folder).steps if record.split == "train"]
        return {name: [step.get(metric) for step in steps] for name, metric in SERIES.items()}

    def command(self, steps: int, model: Path) -> list[str]:
        """Return the command that trains so many steps, from the last checkpoint if there is one."""
        block = {"precision": {"dtype": ARMS[self.arm]}, "monitor": {"run_dir": str(self.folder)}}
        command = [
            sys.executable, "-m", "examples.trl_grpo", "--config", "examples/configs/smollm2.yaml", "--task", "sums",
            "--model_name_or_path", str(model), "--output_dir", str(self.folder), "--run_name", self.folder.name,
            "--eval_prompts", "0", "--max_steps", str(steps), "--seed", str(self.seed), "--shuffle_dataset", "False",
            "--per_device_train_batch_size", str(COMPLETIONS), "--max_completion_length", "8",
            "--vllm_max_model_length", "128", "--learning_rate", "1e-5",
            "--save_strategy", "steps", "--save_steps", str(SAVED_EVERY), "--save_total_limit", "1",
            "--mismatch", json.dumps(block),
        ]  # fmt: skip
        checkpoint = self.last_checkpoint()
        return command if checkpoint is None else [*command, "--resume_from_checkpoint", str(checkpoint)]

    def last_checkpoint(self) -> Path | None:
        """Return the newest checkpoint that was written whole."""
        # TRL writes this file last.
        whole = [file.parent for file in self.folder.glob("checkpoint-*/trainer_state.json")]
        return max(whole, key=lambda folder: int(folder.name.rpartition("-")[2]), default=None)


def train(run: Run, steps: int, model: Path) -> None:
    """Train a run in a process of its own, until it has so many steps."""
    subprocess.run(run.command(steps, model), check=True, env={**os.environ, **rendezvous()})


def window(steps: int) -> int:
    """Return how many steps are one figure: a third of the run, at most 50."""
    return max(2, min(LONGEST_WINDOW, steps // 3))


def known(values: Sequence[float | None]) -> list[float]:
    """Return the values of the steps that have one."""
    return [value for value in values if value is not None]


def figures(run: Run) -> dict[str, Any]:
    """Return a run's row of the record: rewards and gaps at its begin and end, and each step's figures."""
    series = run.series()
    steps = len(series["reward"])
    part = window(steps)
    rewards, right, gaps, checks = (known(series[name]) for name in ("reward", "right", "gap", "weight_check"))
    return {
        "arm": run.arm,
        "seed": run.seed,
        "steps": steps,
        "window": part,
        "reward": [of_the_mean(rewards[:part]), of_the_mean(rewards[-part:])],
        "right": [fmean(right[:part]), fmean(right[-part:])],
        "gap": [fmean(gaps[:part]), fmean(gaps[-part:])],
        "weight_check": [checks[0], max(checks)],
        "reached_engine": fmean(reached) if (reached := known(series["reached_engine"])) else None,
        "seconds": median(known(series["seconds"])),
        "series": {name: [shortened(value) for value in values] for name, values in series.items()},
    }


def shortened(value: float | None) -> float | None:
    """Return a number with four digits, for a file that people read."""
    return None if value is None else float(f"{value:.4g}")


def differences(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return how far runs are apart in what their last steps earn: dtypes on the same prompts, and seeds in float32.

    Steps of one run depend on each other, so that the difference of two seeds, and no interval over steps, tells what is chance.
    """
    by_run = {(row["arm"], row["seed"]): row["series"]["reward"] for row in rows}
    seeds = list(dict.fromkeys(row["seed"] for row in rows))
    pairs = [(("bf16", seed), ("float32", seed)) for seed in seeds]
    pairs += [(("float32", other), ("float32", seeds[0])) for other in seeds[1:]]
    found = []
    for one, other in pairs:
        if one in by_run and other in by_run:
            both = [ours - theirs for ours, theirs in zip(by_run[one], by_run[other], strict=False)]
            names = [f"{arm}-{seed}" for arm, seed in (one, other)]
            found.append({"runs": names, "apart": fmean(both[-window(len(both)) :])})
    return found


def record(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Write the rows, with machine and versions."""
    document = {
        "command": "python -m examples.real_learning",
        **measured_on(),
        "differences": differences(rows),
        "figures": list(rows),
    }
    file.write_text(json.dumps(document, allow_nan=False, separators=(",", ":")) + "\n", encoding="utf-8")


def print_table(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print the rows for a person, and how far the arms are apart at the end."""
    table = Table(title="GRPO on sums, SmolLM2-135M-Instruct: first steps → last steps")
    headings = (
        "steps",
        "of these",
        "reward",
        "mean|Δlogp|",
        "weight check, largest",
        "updates that reach vLLM",
        "s a step",
    )
    for at, heading in enumerate(("run", *headings)):
        table.add_column(heading, justify="right" if at else "left")
    for row in rows:
        first, last = (f"{mean:.2f} ± {half:.2f}" for mean, half in row["reward"])
        reached = "-" if row["reached_engine"] is None else f"{row['reached_engine']:.1%}"
        right = " → ".join(f"{value:.0%}" for value in row["right"])
        gap = " → ".join(f"{value:.1e}" for value in row["gap"])
        table.add_row(
            f"{row['arm']}-{row['seed']}", str(row["steps"]), str(row["window"]), f"{first} → {last}", right, gap,
            f"{row['weight_check'][1]:.1e}", reached, f"{row['seconds']:.0f}",
        )  # fmt: skip
    console.print(table)
    for pair in differences(rows):
        one, other = pair["runs"]
        console.print(f"the last steps of {one} earn {pair['apart']:+.3f} more than those of {other}")


def main() -> None:
    """Train the runs that are asked for, as far as they have not been trained, and print what all of them show."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS, help=f"GRPO steps of each run (default: {STEPS})")
    parser.add_argument(
        "--arms", nargs="+", choices=ARMS, default=list(ARMS), help="dtypes to train in (default: both)"
    )
    parser.add_argument(
        "--seeds", nargs="+", type=int, default=list(SEEDS), help="a run of each arm a seed (default: 0 1)"
    )
    parser.add_argument("--out", type=Path, default=WORK, help=f"folder of the runs (default: {WORK})")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write the runs of this call to this file")
    arguments = parser.parse_args()
    console = Console()
    runs = [
        Run(arm=arm, seed=seed, folder=arguments.out / f"{arm}-{seed}")
        for seed in arguments.seeds
        for arm in arguments.arms
    ]
    try:
        model = smollm2.unpack()
    except (FileNotFoundError, ValueError) as error:
        sys.exit(str(error))
    for number, run in enumerate(runs, 1):
        trained = len(run.series()["reward"])
        console.rule(f"[{number}/{len(runs)}] {run.folder.name}, from step {trained}")
        if trained < arguments.steps:
            train(run, arguments.steps, model)
    rows = [figures(run) for run in runs]
    print_table(rows, console)
    if arguments.record is not None:
        record(rows, arguments.record)
    subprocess.run([sys.executable, "-m", "mismatch_ext", "report", str(arguments.out)], check=True)


if __name__ == "__main__":
    main()
