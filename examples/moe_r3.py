"""Routing replay (R3) for a mixture of experts: the trainer sends each token to the experts that vLLM sent it to.

    python examples/moe_r3.py

On a GPU, give `--model_name_or_path Qwen/Qwen3-30B-A3B`, and put your own data and reward in the lines marked "yours". Every TRL
argument can be given, also in a file with `--config`; with your own model, all others have TRL's defaults. Only the lines marked
"mismatch-ext" differ from a plain TRL script.
"""

from __future__ import annotations

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
from examples.sequences import SequenceSums, left_by_replay, read_sequences

DEFAULTS: dict[str, Any] = {
    "model_name_or_path": "moe",
    "output_dir": "runs/moe_r3",
    "use_vllm": True,
    # For the comparison, every batch is also scored without replay. By default, no batch is.
    "mismatch": {"routing": {"mode": "R3", "measured": 1.0}},  # mismatch-ext
}
# For the small model.
SMALL: dict[str, Any] = {"max_steps": 8, "eval_prompts": 256}
EXPECTATION = """
Near a tie a router takes another expert after the slightest rounding. Such flips are rare ({flips:.2%} of the routing
decisions on the trained distribution) and make the tail of the gap: expect replay to lower the largest |Δlogp| and k3, more so
on unfamiliar prompts, and to change the mean little, which is rounding that FP16 makes smaller (add a precision section).
Here replay left {familiar:.2g} of k3 on the trained distribution and {unfamiliar:.2g} on the unfamiliar prompts, with 95 %
intervals by the bootstrap over responses. The largest |Δlogp| is one token's, and can be larger with replay in a small sample.
"""


@dataclass
class Arguments(shared.ScriptArguments):
    """What this script needs besides the trainer's own arguments."""

    eval_prompts: int = field(default=256, metadata={"help": "Prompts of each evaluation set."})


def main() -> None:
    """Measure the gap with and without replay, then train with it."""
    options, config = shared.parse((Arguments, MismatchGRPOConfig), DEFAULTS, SMALL)
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
    trainer.train()
    shared.end_engine(trainer)
    report(Path(config.output_dir))


def report(output_dir: Path) -> None:
    """Print the gap on the same tokens, without replay and with it."""
    run = shared.recorded(output_dir)
    rows = []
    for split, label in (*shared.SPLITS, ("train", "in training")):
        for routing, prefix in (("the trainer's own", "native/"), ("replayed", "")):
            gap = [
                shared.pooled(run, prefix + name, split)
                for name in ("logp_abs_diff_mean", "logp_abs_diff_max", "k3_kl")
            ]
            rows.append((label, routing, *(f"{value:.2e}" for value in gap)))
    flips = shared.pooled(run, "routing/set_mismatch_frac", "eval/familiar")
    headings = ("prompts", "routing", "mean|Δlogp|", "max|Δlogp|", "k3")
    sums = read_sequences(output_dir)
    familiar, unfamiliar = (left_by_replay(sums, split, "k3") for split, _ in shared.SPLITS)
    said = EXPECTATION.format(flips=flips, familiar=familiar, unfamiliar=unfamiliar)
    shared.conclude("Gap between vLLM and trainer on the same tokens, nats", headings, rows, said, text_columns=2)


if __name__ == "__main__":
    main()
