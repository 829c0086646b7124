"""Learning-rate control by response length (arXiv 2602.01826), on top of warm-up and cosine.

    python examples/lr_control.py

On a GPU, give `--model_name_or_path Qwen/Qwen3-0.6B`, and put your own data and reward in the lines marked "yours". Every TRL
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
from transformers import TrainerCallback

from examples.arithmetic.task import reward

DEFAULTS: dict[str, Any] = {
    "output_dir": "runs/lr_control",
    "use_vllm": True,
    "logging_steps": 1,
    "mismatch": {"lr": {}},  # mismatch-ext
}
# For the small model. The default baseline of 50 batches is for runs of hundreds of steps.
SMALL: dict[str, Any] = {
    "max_steps": 24,
    "warmup_steps": 2,
    "lr_scheduler_type": "cosine",
    "grow_at": 5,
    "mismatch": {"lr": {"baseline_window": 4}},
}
EXPECTATION = """
The multiplier is max(0.5^floor(t / period), 0.1), with t counted from the end of warm-up and period = 1.8 times the step at
which responses surge; until then it is 1. It multiplies the schedule's rate, so that warm-up and cosine go on underneath.
{surge} Responses of a small model do not surge by themselves within so few steps: {cause}. The paper reports that the gap
grows in long runs unless the rate falls; so short a run says nothing about that, and k3 stands here to be watched.
"""


@dataclass
class Arguments(shared.ScriptArguments):
    """What this script needs besides the trainer's own arguments."""

    grow_at: int = field(default=0, metadata={"help": "Step at which responses are let grow; 0 never holds them back."})
    short: int = field(default=12, metadata={"help": "Most tokens of a response before that step."})


class Grow(TrainerCallback):
    """Raises the limit on response length at a step, so that a short run has a surge."""

    def __init__(self, trainer: Any, step: int, short: int) -> None:
        self.engine = trainer.vllm_generation
        self.step, self.limits = step, (short, self.engine.max_completion_length)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Set the limit of the rollouts that are about to be sampled."""
        self.engine.max_completion_length = self.limits[state.global_step >= self.step]


def main() -> None:
    """Train, and print what led the learning rate at each step."""
    options, config = shared.parse((Arguments, MismatchGRPOConfig), DEFAULTS, SMALL)
    trainer = MismatchGRPOTrainer(  # mismatch-ext
        model=shared.model_path(options),
        args=config,
        reward_funcs=reward,  # yours
        train_dataset=shared.problems(),  # yours
    )
    shared.show_progress(trainer)
    if options.grow_at:
        trainer.add_callback(Grow(trainer, options.grow_at, options.short))
    trainer.train()
    shared.end_engine(trainer)
    report(trainer.state.log_history, options)


def report(history: list[dict[str, Any]], options: Arguments) -> None:
    """Print rate, multiplier, length and gap of each step."""
    steps = [entry for entry in history if "loss" in entry]
    headings = ("step", "learning rate", "multiplier", "mean length", "reward", "k3")
    columns = ("learning_rate", "mismatch/lr_multiplier", "completions/mean_length", "reward", "mismatch/k3_kl")
    formats = (".2e", ".3g", ".1f", ".2f", ".1e")
    rows = [
        (str(entry["step"]), *(format(entry[name], digits) for name, digits in zip(columns, formats, strict=True)))
        for entry in steps
    ]
    last, surge = steps[-1], "No surge was found in this run."
    if "mismatch/lr_surge_step" in last:
        surge = f"Here they surged at step {last['mismatch/lr_surge_step']:.0f}"
        surge += f", which makes the period {last['mismatch/lr_period']:.0f} steps."
    cause = "nothing made them grow here"
    if options.grow_at:
        cause = (
            f"this script cut them at {options.short} tokens up to step {options.grow_at}, and let them grow after it"
        )
    shared.conclude("Learning-rate control", headings, rows, EXPECTATION.format(surge=surge, cause=cause))


if __name__ == "__main__":
    main()
