"""How much of the gap is expert flips? The gap with and without routing replay (R3), on the same tokens.

    python examples/replay_gap.py --out runs/replay_gap

Real TRL and vLLM, after GRPO with replay on the mixture-of-experts model: both evaluation sets are sampled once, and every
token is scored twice, with vLLM's routes and with the trainer's own, in bf16 on both sides. In float32 both choose the
same experts, but where two are as near as float32 rounds. Every figure printed comes from the runs of this call; what replay
leaves comes with the interval that the bootstrap over responses gives it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

# When run as a file, Python would look for modules only in examples/.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.table import Table

from examples.sequences import MEASURES, left_by_replay, read_sequences
from mismatch_ext import read_run

CONFIG = "examples/configs/arithmetic.yaml"
MEASURED = {"mode": "R3", "measured": 1.0}
COLUMNS = (
    ("mean|Δlogp|", "logp_abs_diff_mean", ".2e"),
    ("max|Δlogp|", "logp_abs_diff_max", ".3f"),
    ("k3", "k3_kl", ".2e"),
    ("seq KL k3", "seq_k3_kl", ".2e"),
    ("F(1.1)", "f_1.1", ".2e"),
    ("F(2)", "f_2", ".2e"),
)
SPLITS = (("eval/familiar", "trained distribution"), ("eval/unfamiliar", "unfamiliar and longer"))


def run(out: Path, model: str, block: dict[str, Any], *, steps: int = 0, prompts: int) -> Any:
    """Train and evaluate in a process of its own, and return what it measured."""
    shutil.rmtree(out, ignore_errors=True)
    command = [
        sys.executable, "-m", "examples.trl_grpo", "--config", CONFIG, "--model_name_or_path", model,
        "--output_dir", str(out), "--run_name", out.name, "--max_steps", str(steps), "--eval_prompts", str(prompts),
        "--eval_when", "after", "--save_model", str(steps > 0),
        "--mismatch", json.dumps({**block, "routing": MEASURED, "monitor": {"run_dir": str(out)}}),
    ]  # fmt: skip
    subprocess.run(command, check=True)
    return read_run(out)


def measured(data: Any, split: str) -> dict[str, Any]:
    """Return a split's figures, with and without replay."""
    metrics = [record.metrics for record in data.steps if record.split == split][-1]
    return {name.removeprefix("mismatch/"): value for name, value in metrics.items() if name.startswith("mismatch/")}


def row(
    table: Table, labels: tuple[str, str, str], found: dict[str, Any], prefix: str = "", *, last: bool = False
) -> None:
    """Add a row to the table."""
    figures = [format(found[prefix + name], digits) for _, name, digits in COLUMNS]
    # The model's own choice is recorded only under replay, so each pair of rows has one figure.
    flips = "" if prefix else f"{found['routing/set_mismatch_frac']:.2%}"
    table.add_row(*labels, f"{found['tokens']:.0f}", *figures, flips, end_section=last)


def main() -> None:
    """Measure, train, measure again; print the table and write it to summary.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/replay_gap"))
    parser.add_argument("--steps", type=int, default=30, help="GRPO steps")
    parser.add_argument("--prompts", type=int, default=3072, help="prompts per evaluation set in bf16")
    parser.add_argument("--oracle-prompts", type=int, default=512, help="prompts per evaluation set in float32")
    args = parser.parse_args()
    console = Console(width=170)
    bf16, fp32 = {"precision": {"dtype": "bfloat16"}}, {"precision": {"dtype": "float32"}}
    runs = {
        "bf16": run(args.out / "bf16", "moe", bf16, steps=args.steps, prompts=args.prompts),
        "float32": run(args.out / "float32", str(args.out / "bf16"), fp32, prompts=args.oracle_prompts),
    }
    header = runs["bf16"].header
    summary: dict[str, Any] = {
        "steps": args.steps, "measured_on": header["run"]["device"], "versions": header["versions"],
        "runs": {name: {split: measured(data, split) for split, _ in SPLITS} for name, data in runs.items()},
    }  # fmt: skip
    sums = read_sequences(args.out / "bf16")
    left = {split: {name: left_by_replay(sums, split, name) for name in MEASURES} for split, _ in SPLITS}
    summary["left"] = {split: {name: found.to_dict() for name, found in by.items()} for split, by in left.items()}
    (args.out / "summary.json").write_text(json.dumps(summary, indent=1), encoding="utf-8")
    table = Table(title="Gap between vLLM and TRL in nats; the two rows of a pair are of the same tokens")
    for heading in ("both sides", "prompts", "routing", "tokens", *(heading for heading, *_ in COLUMNS), "flips"):
        table.add_column(
            heading, justify="left" if heading in ("both sides", "prompts", "routing") else "right", no_wrap=True
        )
    for name, split, label in [(n, *s) for n in runs for s in SPLITS]:
        found = summary["runs"][name][split]
        row(table, (name, label, "its own"), found, "native/")
        row(table, (name, label, "replayed"), found, last=True)
    console.print(table)
    for split, label in SPLITS:
        k3, mean = (format(left[split][name], ".3g") for name in ("k3", "abs"))
        console.print(f"{label}: replay leaves {k3} of k3 and {mean} of the mean |Δlogp|, with 95 % intervals")
    flips = max(found["routing/set_mismatch_frac"] for found in summary["runs"]["float32"].values())
    console.print(f"float32: {flips:.2%} of (token, layer) pairs routed differently by engine and trainer")


if __name__ == "__main__":
    main()
