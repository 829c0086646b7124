"""Shared by the TRL examples: arguments with defaults for two CPU cores, the small models, the progress bar.

Import it before TRL and vLLM, because they read the environment only once, when they are imported.
"""

from __future__ import annotations

import os

# A small KV cache on a CPU, and no output from libraries about what the trainer already reports.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from datasets import Dataset
from mismatch_ext.adapters.vllm import shutdown
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from trl import TrlParser

from examples.arithmetic.shipped import shipped_model
from examples.arithmetic.task import FAMILIAR_DIGITS, UNFAMILIAR_DIGITS, make_dataset

# On two CPU cores, a run of these models takes a minute or two.
SMALL_MODELS = ("dense", "moe")
SMALL = Path(__file__).parent / "configs/arithmetic.yaml"


@dataclass
class ScriptArguments:
    """The arguments that every example needs besides the trainer's own."""

    model_name_or_path: str = field(
        default="dense", metadata={"help": "'dense' or 'moe' (examples/arithmetic/models), or a model's name or path."}
    )


def parse(
    kinds: tuple[Any, ...], defaults: Mapping[str, Any] | None = None, small: Mapping[str, Any] | None = None
) -> tuple[Any, ...]:
    """Parse the command line and the file that `--config` names; both override the defaults.

    Args:
        kinds: Dataclasses of arguments.
        defaults: Defaults that replace the dataclasses' own, for any model.
        small: Sizes for the small models, which override `configs/arithmetic.yaml`; other models keep TRL's. None sets none.
    """
    # transformers trains on a CPU only when told to; vLLM takes this share of the machine's memory there.
    found = {} if torch.cuda.is_available() else {"use_cpu": True, "vllm_gpu_memory_utilization": 0.05}
    found |= defaults or {}
    if small is not None:
        first = TrlParser(ScriptArguments, add_help=False)
        first.set_defaults_with_config(**found)
        if first.parse_args_and_config(return_remaining_strings=True)[0].model_name_or_path in SMALL_MODELS:
            found = {**yaml.safe_load(SMALL.read_text(encoding="utf-8")), **found, **small}
    parser = TrlParser(kinds)
    parser.set_defaults_with_config(**found)
    return parser.parse_args_and_config()


def model_path(options: ScriptArguments) -> str:
    """Return the path or name of the model to train."""
    name = options.model_name_or_path
    return str(shipped_model(name)) if name in SMALL_MODELS else name


def problems(count: int = 1024, digits: tuple[int, int] = FAMILIAR_DIGITS, seed: int = 1000) -> Dataset:
    """Return addition problems, by default of the kind that the small models were trained on."""
    return Dataset.from_list(make_dataset(count, digits, seed=seed))


def evaluation_sets(count: int) -> dict[str, Dataset]:
    """Return problems of the trained distribution, and longer ones, on which the policy is less certain."""
    return {"familiar": problems(count, seed=1), "unfamiliar": problems(count, UNFAMILIAR_DIGITS, seed=2)}


class GapProgress(ProgressCallback):
    """The usual progress bar, followed by reward and gap instead of a dictionary per step."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Show the latest figures behind the bar."""
        if state.is_world_process_zero and self.training_bar is not None and logs and "reward" in logs:
            shown = {"reward": f"{logs['reward']:.2f}", "length": f"{logs['completions/mean_length']:.0f}"}
            if "mismatch/logp_abs_diff_mean" in logs:
                shown["mean|Δlogp|"] = f"{logs['mismatch/logp_abs_diff_mean']:.1e}"
            self.training_bar.set_postfix(shown)


def show_progress(trainer: Any) -> None:
    """Replace the trainer's own output by the progress bar."""
    trainer.remove_callback(ProgressCallback)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(GapProgress)


def end_engine(trainer: Any) -> None:
    """Shut vLLM down, if the trainer has it in this process; otherwise it would outlive the last line of a script."""
    if trainer.use_vllm and trainer.vllm_mode == "colocate":
        shutdown(trainer.vllm_generation.llm)


def pooled(run: Any, metric: str, split: str = "train") -> float | None:
    """Return a metric of our own over the steps of a split: the maximum, or the mean weighted by tokens; None without a value."""
    steps = [record.metrics for record in run.steps if record.split == split]
    values = [
        (step["mismatch/" + metric], step["mismatch/tokens"])
        for step in steps
        if step.get("mismatch/" + metric) is not None
    ]
    if not values:
        return None
    if metric.endswith("_max"):
        return max(value for value, _ in values)
    return sum(value * tokens for value, tokens in values) / sum(tokens for _, tokens in values)
