"""Learning-rate control and alarms for a trainer whose class cannot change: TRL's own GRPOTrainer and one callback.

    python examples/callback_only.py

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
import torch
from mismatch_ext.adapters.trl import MismatchCallback  # mismatch-ext
from trl import GRPOConfig, GRPOTrainer

from examples.arithmetic.task import reward

ALARMS = {"completions/clipped_ratio": {"above": 0.5}, "reward": {"below": 0.2}}
DEFAULTS: dict[str, Any] = {
    "output_dir": "runs/callback_only",
    # On a CPU, TRL's own update of vLLM's weights fails, so transformers generates there.
    "use_vllm": torch.cuda.is_available(),
    "logging_steps": 1,
    "mismatch": {"lr": {}, "monitor": {"alarms": ALARMS}},
}
# For the small model. Without `period`, the period is found from a surge of response lengths, which takes hundreds of steps.
SMALL: dict[str, Any] = {
    "max_steps": 10,
    "lr_scheduler_type": "cosine",
    "mismatch": {"lr": {"period": 3}, "monitor": {"alarms": ALARMS}},
}
EXPECTATION = """
The rate is the trainer's own schedule times a multiplier, by the rule that the banner above names; here the multiplier ended
at {multiplier:g}. {alarms} Built-in alarms watch loss, gradient norm and, with vLLM, the gap that TRL logs. The callback reads
what the trainer logs and no more: the gap's k3 and tail, precision, correction, KL and routing replay need MismatchGRPOTrainer.
In {steps} steps the reward went from {first:.2f} to {last:.2f}; a run this short says nothing about what a lower rate does to it.
"""


@dataclass
class Arguments(shared.ScriptArguments):
    """What this script needs besides the trainer's own arguments."""

    mismatch: str = field(default="", metadata={"help": "The block, as JSON, YAML or a file: lr and monitor."})


def main() -> None:
    """Train with the stock trainer, and print what the callback did."""
    options, config = shared.parse((Arguments, GRPOConfig), DEFAULTS, SMALL)
    trainer = GRPOTrainer(
        model=shared.model_path(options),
        args=config,
        reward_funcs=reward,  # yours
        train_dataset=shared.problems(),  # yours
        callbacks=[MismatchCallback(options.mismatch)],  # mismatch-ext
    )
    shared.show_progress(trainer)
    trainer.train()
    shared.end_engine(trainer)
    report(trainer.state.log_history, Path(config.output_dir))


def report(history: list[dict[str, Any]], output_dir: Path) -> None:
    """Print rate, multiplier, length and reward of each step, and the alarms."""
    steps = [entry for entry in history if "loss" in entry]
    headings = ("step", "learning rate", "multiplier", "mean length", "truncated", "reward")
    columns = {
        "learning_rate": ".2e",
        "mismatch/lr_multiplier": ".3g",
        "completions/mean_length": ".1f",
        "completions/clipped_ratio": ".2f",
        "reward": ".2f",
    }
    rows = [(str(entry["step"]), *(format(entry[name], digits) for name, digits in columns.items())) for entry in steps]
    events = [event.message for event in shared.recorded(output_dir).events if event.name == "alarm"]
    alarms = " ".join(["Alarms:", *events]) if events else "No alarm was raised."
    first, last = steps[0], steps[-1]
    said = EXPECTATION.format(
        multiplier=last["mismatch/lr_multiplier"],
        alarms=alarms,
        steps=len(steps),
        first=first["reward"],
        last=last["reward"],
    )
    shared.conclude("Stock GRPOTrainer with MismatchCallback", headings, rows, said)


if __name__ == "__main__":
    main()
