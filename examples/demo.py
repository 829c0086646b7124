"""The main job, three settings side by side: stock bf16, uniform FP16, and float32 as the oracle.

    python -m examples.demo --model dense --run-dir runs/demo

Each setting is a real GRPO run of `examples.trl_grpo` in a process of its own: TRL's trainer, vLLM as the rollout
engine in the same process, the same checkpoint and prompts. Before training, when all three still hold the same
weights, the gap is measured on prompts of the trained distribution and on unfamiliar, longer ones. Every figure
printed comes from the runs of this call.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from examples.arithmetic.pretrain import ensure_model
from mismatch_ext.report import Summary, build, load_runs, summarise

CONFIG = "examples/configs/arithmetic.yaml"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One column of the comparison.

    Args:
        name: Folder and row name.
        title: What a reader should know of it.
        block: The `mismatch:` block.
        steps: GRPO steps; fewer for float16, whose matrix products a CPU computes about eight times slower.
    """

    name: str
    title: str
    block: dict[str, Any]
    steps: int


SETTINGS = (
    Setting(name="bf16", title="TRL's own dtypes: bf16 autocast, engine dtype auto", block={}, steps=24),
    Setting(
        name="fp16",
        title="uniform FP16",
        # A first scale that a small model's gradients do not overflow at: few steps are no time to search for one.
        block={"precision": {"dtype": "float16", "loss_scale": {"init_scale": 4096.0}}},
        steps=12,
    ),
    Setting(name="fp32", title="float32, the oracle", block={"precision": {"dtype": "float32"}}, steps=24),
)
COLUMNS = (
    ("mean|Δlogp|", ("logp_abs_diff_mean", "1e")),
    ("max|Δlogp|", ("logp_abs_diff_max", "1e")),
    ("k1", ("kl", "1e")),
    ("k3", ("k3_kl", "1e")),
    ("seq KL k1", ("seq_kl", "1e")),
    ("seq KL k3", ("seq_k3_kl", "1e")),
    ("F(1.1)", ("f_1.1", "1e")),
    ("F(2)", ("f_2", "1e")),
    ("ESS", ("ess_seq", "4f")),
)
SPLITS = (
    ("eval/familiar", "trained distribution, same weights"),
    ("eval/unfamiliar", "unfamiliar and longer, same weights"),
    ("train", "during training"),
)


def train(setting: Setting, model: Path, run_dir: Path, steps: int) -> float:
    """Run one setting in a process of its own and return its wall-clock seconds."""
    out = run_dir / setting.name
    shutil.rmtree(out, ignore_errors=True)
    command = [
        sys.executable, "-m", "examples.trl_grpo", "--config", CONFIG,
        "--model_name_or_path", str(model), "--output_dir", str(out), "--run_name", setting.name,
        "--max_steps", str(steps),
        "--mismatch", json.dumps({**setting.block, "monitor": {"run_dir": str(out)}}),
    ]  # fmt: skip
    start = time.perf_counter()
    subprocess.run(command, check=True)
    return time.perf_counter() - start


def print_table(summary: Summary, console: Console) -> None:
    """Print the rows for a person, evaluation sets first."""
    table = Table(title="Gap between rollout engine (vLLM) and trainer (TRL), in nats")
    for heading in ("run", "on", *(heading for heading, _ in COLUMNS), "reward"):
        table.add_column(heading, justify="left" if heading in ("run", "on") else "right", no_wrap=True)
    for split, label in SPLITS:
        rows = [row for row in summary.rows if row.split == split]
        for row in rows:
            reward = f"{row.reward_last:.2f}"
            if split == "train":
                reward = f"{row.reward_first:.2f} → {row.reward_last:.2f} in {row.steps} steps"
            figures = [
                "-" if row.values[key] is None else f"{row.values[key]:.{digits}}" for _, (key, digits) in COLUMNS
            ]
            table.add_row(row.run, label, *figures, reward, end_section=row is rows[-1])
    console.print(table)


def print_ratios(summary: Summary, console: Console) -> None:
    """Print how many times larger the bf16 gap is than the FP16 one, and how far the oracle is from zero."""
    for split, label in SPLITS:
        for ratio in summary.ratios:
            if (ratio.split, ratio.run, ratio.over) == (split, "bf16", "fp16"):
                mean, k3 = ratio.values["logp_abs_diff_mean"], ratio.values["k3_kl"]
                console.print(f"bf16 over FP16, {label}: mean|Δlogp| {mean:.1f}x, k3 {k3:.0f}x")
    largest = max(row.values["logp_abs_diff_max"] for row in summary.rows if row.run == "fp32")
    console.print(f"float32, the oracle: largest |Δlogp| of any token {largest:.1e}")


def main() -> None:
    """Train the three settings, print the table, write summary and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("dense", "moe"), default="dense")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/demo"))
    parser.add_argument("--model-cache", type=Path, default=Path(".cache/models"))
    parser.add_argument("--steps", type=int, default=None, help="GRPO steps of every setting (default: each its own)")
    args = parser.parse_args()
    console = Console(width=180)
    model = ensure_model(args.model, args.model_cache)
    args.run_dir.mkdir(parents=True, exist_ok=True)
    seconds = {}
    for number, setting in enumerate(SETTINGS, start=1):
        console.rule(f"[{number}/{len(SETTINGS)}] {setting.name}: {setting.title}")
        seconds[setting.name] = train(setting, model, args.run_dir, args.steps or setting.steps)
    runs = load_runs(args.run_dir)
    summary = summarise(runs)
    header = runs[SETTINGS[0].name].header
    document = {
        "model": args.model,
        "measured_on": header["run"]["device"],
        "versions": header["versions"],
        "seconds": seconds,
        **summary.to_dict(),
    }
    (args.run_dir / "summary.json").write_text(json.dumps(document, indent=1), encoding="utf-8")
    report = build(args.run_dir)
    print_table(summary, console)
    print_ratios(summary, console)
    console.print(report.verdict)
    console.print(f"training and measuring took {sum(seconds.values()):.0f} s on {header['run']['device']}")
    console.print(f"report: {report.path}", soft_wrap=True)


if __name__ == "__main__":
    main()
