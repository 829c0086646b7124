"""KL regularisation in the real trainer: trains with TRL's own term, then the default of the `kl` section, then another setting.

    python examples/kl_ablation.py

On a GPU, give `--model_name_or_path Qwen/Qwen3-0.6B`, and put your own data and reward in the lines marked "yours". Every TRL
argument can be given, also in a file with `--config`; with your own model, all others have TRL's defaults. Only the lines marked
"mismatch-ext" differ from a plain TRL script. It starts its own processes, so do not use `accelerate launch`.
examples/kl_placement.py shows what each term does to a policy whose optimum is known.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

# When run as a file, Python would look for modules only in examples/.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import examples.script as shared  # first, because it sets what vLLM reads when it is imported

# isort: split
from mismatch_ext.adapters.trl import MismatchGRPOConfig, MismatchGRPOTrainer  # mismatch-ext
from tqdm import tqdm

from examples.arithmetic.task import reward

SETTINGS = {
    "TRL k3 loss": {},  # without a kl section TRL's own term stays
    "k1 reward": {"kl": {"estimator": "k1", "placement": "reward"}},
    "k3 both": {"kl": {"estimator": "k3", "placement": "both"}},
}
DEFAULTS: dict[str, Any] = {
    "output_dir": "runs/kl_ablation",
    "use_vllm": True,
    "logging_steps": 1,
    "beta": 0.05,  # the coefficient, in every setting
    "mismatch": {},  # mismatch-ext
}
# For the small model: settings under which it leaves the reference within a few steps.
SMALL: dict[str, Any] = {"max_steps": 8, "learning_rate": 3e-4, "beta": 0.5}
EXPECTATION = """
The KL column is the same estimate in every row (k3 to the reference, nats per token, in TRL's own row times its ratio, which
is 1 on-policy); what differs is the gradient that
pulls. TRL's own term (k3 in the loss, since 1.10 times a differentiable ratio) has the gradient of the per-token reverse KL,
which credits no KL to earlier tokens; k1 in the reward and k3 in both have the gradient of KL(pi||ref), with
different spread (docs/kl.md). Each row is one seed and {steps} steps, and its last figures are of {window} batches: rows that are
{spread:.2f} apart in reward, as here, may be noise. Repeat with more --max_steps and with other --seed before ranking them.
"""
WINDOW = 3


@dataclass
class Arguments(shared.ScriptArguments):
    """What this script needs besides the trainer's own arguments."""

    only: str = field(
        default="", metadata={"help": "Train with this setting, in this process; empty runs all of them."}
    )


def main() -> None:
    """Train with each setting in a process of its own, because an engine is one per process."""
    options, config = shared.parse((Arguments, MismatchGRPOConfig), DEFAULTS, SMALL)
    if options.only:
        train(options, config)
        return
    folders = {name: Path(config.output_dir, name.replace(" ", "-")) for name in SETTINGS}
    for name, folder in tqdm(folders.items(), unit="setting"):
        tqdm.write(name)
        block = json.dumps({**config.mismatch, **SETTINGS[name]})  # mismatch-ext
        own = ["--only", name, "--output_dir", str(folder), "--mismatch", block]
        subprocess.run([sys.executable, *sys.argv, *own], check=True)
    report(folders)


def train(options: Arguments, config: MismatchGRPOConfig) -> None:
    """Train with the block that the command line gave."""
    trainer = MismatchGRPOTrainer(  # mismatch-ext
        model=shared.model_path(options),
        args=config,
        reward_funcs=reward,  # yours
        train_dataset=shared.problems(),  # yours
    )
    shared.show_progress(trainer)
    trainer.train()
    shared.end_engine(trainer)


def report(folders: dict[str, Path]) -> None:
    """Print reward, distance to the reference and length of each setting, first batches -> last batches."""
    rows, rewards = [], []
    for name, folder in folders.items():
        run = shared.recorded(folder)
        ends = {key: run.series(key)[1] for key in ("reward", "kl", "completions/mean_length")}
        steps = len(ends["reward"])
        window = min(WINDOW, steps)
        pairs = {key: (mean(values[:window]), mean(values[-window:])) for key, values in ends.items()}
        rewards.append(pairs["reward"][1])
        digits = (".3f", ".2e", ".1f")
        rows.append((name, *(f"{a:{d}} → {b:{d}}" for (a, b), d in zip(pairs.values(), digits, strict=True))))
    said = EXPECTATION.format(steps=steps, window=window, spread=max(rewards) - min(rewards))
    headings = ("KL term", "reward", "KL to the reference", "mean length")
    shared.conclude(f"First {window} batches → last {window} batches", headings, rows, said)


if __name__ == "__main__":
    main()
