"""Uniform FP16: trainer, weight updates and vLLM in float16; prints the gap beside the gap with TRL's own dtypes.

    python examples/dense_fp16.py

On a GPU, give `--model_name_or_path Qwen/Qwen3-0.6B`, and put your own data and reward in the lines marked "yours". Every TRL
argument can be given, also in a file with `--config`; with your own model, all others have TRL's defaults. Only the lines marked
"mismatch-ext" differ from a plain TRL script. Under `accelerate launch`, give `--compare False`.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# When run as a file, Python would look for modules only in examples/.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import examples.script as shared  # first, because it sets what vLLM reads when it is imported

# isort: split
from mismatch_ext.adapters.trl import MismatchGRPOConfig, MismatchGRPOTrainer  # mismatch-ext

from examples.arithmetic.task import reward
from examples.sequences import SequenceSums, read_sequences, times_larger

DEFAULTS: dict[str, Any] = {
    "output_dir": "runs/dense_fp16",
    "use_vllm": True,
    "mismatch": {"precision": {"dtype": "float16"}},  # mismatch-ext
}
# For the small model. A few steps are too few to search for a loss scale, so the first one does not overflow its gradients.
SMALL: dict[str, Any] = {
    "max_steps": 3,
    "eval_prompts": 128,
    "mismatch": {"precision": {"dtype": "float16", "init_scale": 4096.0}},
}
EXPECTATION = """
bfloat16 rounds to 8 significant bits and float16 to 11, so that its rounding errors are 8 times smaller: the mean |Δlogp|
should be about 8 times smaller, and k3, which grows with the square, about 64 times. Here they were {mean:.2g} and {k3:.2g}
times smaller on problems of the trained distribution, with 95 % intervals by the bootstrap over responses. A run of {steps}
steps shows the gap, not what it does to a long training.
"""


@dataclass
class Arguments(shared.ScriptArguments):
    """What this script needs besides the trainer's own arguments."""

    eval_prompts: int = field(default=256, metadata={"help": "Prompts of each evaluation set."})
    compare: bool = field(default=True, metadata={"help": "Measure TRL's own dtypes as well, in a process of its own."})


def main() -> None:
    """Measure the gap at the same weights, then train in float16."""
    options, config = shared.parse((Arguments, MismatchGRPOConfig), DEFAULTS, SMALL)
    stock = f"{config.output_dir}/stock"
    if options.compare:  # a process can hold only one engine
        again = ["--compare", "False", "--max_steps", "0", "--output_dir", stock, "--mismatch", "{}"]
        subprocess.run([sys.executable, *sys.argv, *again], check=True)
    trainer = MismatchGRPOTrainer(  # mismatch-ext
        model=shared.model_path(options),
        args=config,
        reward_funcs=reward,  # yours
        train_dataset=shared.problems(),  # yours
        eval_dataset=shared.evaluation_sets(options.eval_prompts),  # yours
    )
    shared.show_progress(trainer)
    sums = SequenceSums(trainer)  # for the intervals below
    trainer.evaluate()
    sums.write(Path(config.output_dir))
    if config.max_steps != 0:
        trainer.train()
    shared.end_engine(trainer)
    if options.compare:
        report(Path(stock), Path(config.output_dir), trainer.state.global_step)


def report(stock: Path, fp16: Path, steps: int) -> None:
    """Print the gap of both runs at the weights that both began with, and during training."""
    runs = {"TRL's own": shared.recorded(stock), "float16": shared.recorded(fp16)}
    rows = []
    for split, label in shared.SPLITS:
        for name, run in runs.items():
            gap = [shared.pooled(run, metric, split) for metric in ("logp_abs_diff_mean", "logp_abs_diff_max", "k3_kl")]
            rows.append((label, name, *(f"{value:.2e}" for value in gap)))
    if steps != 0:
        gap = [
            shared.pooled(runs["float16"], metric) for metric in ("logp_abs_diff_mean", "logp_abs_diff_max", "k3_kl")
        ]
        rows.append(("in training", "float16", *(f"{value:.2e}" for value in gap)))
    headings = ("prompts", "dtypes", "mean|Δlogp|", "max|Δlogp|", "k3")
    sums = read_sequences(stock), read_sequences(fp16)
    mean, k3 = (times_larger(*sums, "eval/familiar", measure) for measure in ("abs", "k3"))
    said = EXPECTATION.format(mean=mean, k3=k3, steps=steps)
    shared.conclude("Gap between vLLM and trainer, nats per token", headings, rows, said, text_columns=2)


if __name__ == "__main__":
    main()
