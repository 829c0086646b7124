"""How much of the gap is expert flips? The gap with and without routing replay (R3), on the same tokens.

    python -m examples.replay_gap --out runs/replay_gap

Real TRL and vLLM, after GRPO with replay on the mixture-of-experts model: both evaluation sets are sampled once, and every
token is scored twice, with vLLM's routes and with the trainer's own, in bf16 on both sides. In float32 both choose the
same experts, except where two are as near as float32 rounds. What replay leaves comes with the interval that the bootstrap over
responses gives it.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

# When run as a file, Python would look for modules only in examples/.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console

from examples.arithmetic.shipped import shipped_model
from examples.demo import ADDITION, FP32, R3, Setting, print_replay, replay_rows, train
from examples.sequences import MEASURES, left_by_replay, read_sequences
from mismatch_ext import read_run

BF16 = Setting(name="bf16", title="", block={"precision": {"dtype": "bfloat16"}, **R3}, steps=30)
ORACLE = Setting(name="float32", title="", block={**FP32, **R3}, steps=0)


def measured(run: Any, split: str) -> dict[str, Any]:
    """Return the last evaluation's figures of a split, with replay and (`native/`) without."""
    metrics = [record.metrics for record in run.steps if record.split == split][-1]
    return {name.removeprefix("mismatch/"): value for name, value in metrics.items() if name.startswith("mismatch/")}


def main() -> None:
    """Train, measure, print the table, and write it to summary.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/replay_gap"))
    parser.add_argument("--steps", type=int, default=BF16.steps, help="GRPO steps")
    parser.add_argument("--prompts", type=int, default=3072, help="prompts per evaluation set in bf16")
    parser.add_argument("--oracle-prompts", type=int, default=512, help="prompts per evaluation set in float32")
    args = parser.parse_args()
    after = ("--eval_when", "after", "--save_model", "True")
    train(BF16, shipped_model("moe"), args.out, args.steps, args.prompts, *after)
    train(ORACLE, args.out / BF16.name, args.out, 0, args.oracle_prompts)
    runs = {setting.name: read_run(args.out / setting.name) for setting in (BF16, ORACLE)}
    sums = read_sequences(args.out / BF16.name)
    left = {split: {name: left_by_replay(sums, split, name) for name in MEASURES} for split, _ in ADDITION}
    summary = {
        "steps": args.steps,
        "runs": {name: {split: measured(run, split) for split, _ in ADDITION} for name, run in runs.items()},
        "left": {split: {name: asdict(interval) for name, interval in by.items()} for split, by in left.items()},
    }
    (args.out / "summary.json").write_text(json.dumps(summary, indent=1), encoding="utf-8")

    console = Console(width=170)
    print_replay(replay_rows(runs), console)
    for split, label in ADDITION:
        k3, mean = (format(left[split][name], ".3g") for name in ("k3", "abs"))
        console.print(f"{label}: replay leaves {k3} of k3 and {mean} of the mean |Δlogp|, with 95 % intervals")


if __name__ == "__main__":
    main()
