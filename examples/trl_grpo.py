"""GRPO with TRL, vLLM and the `mismatch:` block, on addition problems with short worked steps, or on chat prompts.

    python examples/trl_grpo.py --config examples/configs/fp16.yaml
    python examples/trl_grpo.py --max_steps 20 --output_dir runs/mine --mismatch '{"precision": {"dtype": "float16"}}'

`examples/configs` has a file for each feature: fp16, r3, lr, kl; smollm2 has chat prompts for a real model. Every TRL argument
can be given, also in the file. On a GPU, give `--model_name_or_path Qwen/Qwen3-0.6B`: with your own model, all other arguments
have TRL's defaults. Only the two class names and `mismatch` differ from a plain TRL script.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

# When run as a file, Python would look for modules only in examples/.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import examples.script as shared  # first, because it sets what vLLM reads when it is imported

# isort: split
from mismatch_ext.adapters.trl import MismatchGRPOConfig, MismatchGRPOTrainer

from examples import chat
from examples.arithmetic.task import reward as addition_reward
from examples.sequences import SequenceSums


@dataclass
class ScriptArguments(shared.ScriptArguments):
    """What this script needs besides the trainer's own arguments."""

    task: Literal["addition", "chat", "sums"] = field(
        default="addition",
        metadata={"help": "Addition for the small models, or chat prompts or sums (examples/chat.py)."},
    )
    eval_prompts: int = field(default=256, metadata={"help": "Prompts per evaluation set; 0 skips evaluation."})
    eval_when: Literal["before", "after"] = field(
        default="before", metadata={"help": "Whether the gap is measured before training or after it."}
    )
    save_model: bool = field(default=False, metadata={"help": "Save the trained model in the output folder."})


def main() -> None:
    """Train, after measuring the gap on both evaluation sets."""
    script, config = shared.parse((ScriptArguments, MismatchGRPOConfig), {"use_vllm": True, "mismatch": {}}, small={})
    # With zero steps, only the checkpoint itself is evaluated.
    rows = max(config.max_steps, 1) * config.generation_batch_size // config.num_generations
    is_chat = script.task != "addition"
    prompts = chat if is_chat else shared
    rewards: list[Any] = [chat.reward if is_chat else addition_reward]
    if script.task == "sums":
        problems = chat.sums(rows, config.seed)
        # Right answers are counted and not rewarded: at first there are too few of them to learn from.
        rewards, config.reward_weights = [chat.nearness, *rewards], [1.0, 0.0]
    else:
        problems = prompts.problems(rows, seed=1000 + config.seed)
    evaluation = prompts.evaluation_sets(script.eval_prompts) if script.eval_prompts else None
    trainer = MismatchGRPOTrainer(
        model=shared.model_path(script),
        reward_funcs=rewards,
        args=config,
        train_dataset=problems,
        eval_dataset=evaluation,
    )
    shared.show_progress(trainer)
    sums = SequenceSums(trainer)
    if evaluation is not None and script.eval_when == "before":
        trainer.evaluate()
    if config.max_steps > 0:
        trainer.train(resume_from_checkpoint=config.resume_from_checkpoint)
    if evaluation is not None and script.eval_when == "after":
        trainer.evaluate()
    if evaluation is not None:
        sums.write(Path(config.output_dir))
    if script.save_model:
        trainer.save_model()
    shared.end_engine(trainer)


if __name__ == "__main__":
    main()
