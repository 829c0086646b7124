"""GRPO with TRL, vLLM and the `mismatch:` block, on addition problems with short worked steps.

    python -m examples.trl_grpo --config examples/configs/arithmetic.yaml --output_dir runs/mine \
        --max_steps 20 --mismatch '{"precision": {"dtype": "float16"}}'

The only lines that differ from a plain TRL script are the two class names and `mismatch`.
"""

from __future__ import annotations

import os

# Before vLLM is imported: a small KV cache, and silence where the trainer already reports.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from datasets import Dataset
from mismatch_ext.adapters.trl import MismatchGRPOConfig, MismatchGRPOTrainer
from mismatch_ext.adapters.vllm import shutdown
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from trl import TrlParser

from examples.arithmetic.pretrain import ensure_model
from examples.arithmetic.task import FAMILIAR_DIGITS, UNFAMILIAR_DIGITS, make_dataset, reward


@dataclass
class ScriptArguments:
    """What this script needs besides the trainer's own arguments."""

    model_name_or_path: str = field(
        default="dense", metadata={"help": "'dense' or 'moe' (trained here and cached), or a checkpoint's path."}
    )
    model_cache: str = field(default=".cache/models", metadata={"help": "Where trained models are kept."})
    eval_prompts: int = field(default=256, metadata={"help": "Prompts per evaluation set; 0 skips evaluation."})
    eval_when: Literal["before", "after"] = field(
        default="before", metadata={"help": "Whether the gap is measured before training or after it."}
    )
    save_model: bool = field(default=False, metadata={"help": "Save the trained model in the output folder."})


class GapProgress(ProgressCallback):
    """The usual progress bar, with reward and gap behind it in place of a dictionary per step."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Show the latest figures behind the bar."""
        if state.is_world_process_zero and self.training_bar is not None and logs and "reward" in logs:
            shown = {"reward": f"{logs['reward']:.2f}", "length": f"{logs['completions/mean_length']:.0f}"}
            if "mismatch/logp_abs_diff_mean" in logs:
                shown["mean|Δlogp|"] = f"{logs['mismatch/logp_abs_diff_mean']:.1e}"
            self.training_bar.set_postfix(shown)


def main() -> None:
    """Train, after measuring the gap on both evaluation sets."""
    script, config = TrlParser((ScriptArguments, MismatchGRPOConfig)).parse_args_and_config()
    model = script.model_name_or_path
    if model in ("dense", "moe"):
        model = str(ensure_model(model, Path(script.model_cache)))
    # No step at all is an evaluation of the checkpoint as it is.
    rows = max(config.max_steps, 1) * config.generation_batch_size // config.num_generations
    evaluation = None
    if script.eval_prompts:
        evaluation = {
            "familiar": Dataset.from_list(make_dataset(script.eval_prompts, FAMILIAR_DIGITS, seed=1)),
            "unfamiliar": Dataset.from_list(make_dataset(script.eval_prompts, UNFAMILIAR_DIGITS, seed=2)),
        }
    trainer = MismatchGRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(make_dataset(rows, FAMILIAR_DIGITS, seed=1000 + config.seed)),
        eval_dataset=evaluation,
    )
    trainer.remove_callback(ProgressCallback)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(GapProgress)
    if evaluation is not None and script.eval_when == "before":
        trainer.evaluate()
    if config.max_steps > 0:
        trainer.train()
    if evaluation is not None and script.eval_when == "after":
        trainer.evaluate()
    if script.save_model:
        trainer.save_model()
    shutdown(trainer.vllm_generation.llm)


if __name__ == "__main__":
    main()
