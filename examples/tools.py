"""GRPO with a tool on SmolLM2-135M-Instruct: each completion has two calls and an answer, rendered by the chat template.

    python -m examples.tools

The model is too small to call tools by itself. Everything that it says counts as a call until TRL's limit ends it. Its own chat
template shows neither tools nor calls, so calls are added to the template, as TRL requires.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

# When run as a file, Python would look for modules only in examples/.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import examples.script as shared  # first, because it sets what vLLM reads when it is imported

# isort: split
import torch
from mismatch_ext.adapters.trl import MismatchGRPOConfig, MismatchGRPOTrainer
from transformers import AutoTokenizer

from examples import chat, smollm2

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 17, "b": 25}}}
CALLED = {
    "start_anchor": "<|im_start|>assistant\n",
    "defaults": {"role": "assistant", "tool_calls": [CALL]},
    "fields": {"content": {"content": "text"}},
}
"""Takes every answer for a call, whatever it says."""
SAID = "message['content'] + '<|im_end|>'"
SAID_AND_CALLED = "message['content'] + (message.tool_calls | tojson if message.tool_calls else '') + '<|im_end|>'"
CALLS = 2


def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return str(a + b)


def tokenizer_with_calls(model: str) -> Any:
    """Return a model's tokenizer, whose template shows calls.

    Raises:
        ValueError: The template is another one.
    """
    tokenizer = AutoTokenizer.from_pretrained(model)
    if SAID not in tokenizer.chat_template:
        raise ValueError(f"The chat template of {model} has no {SAID}. Give a checkpoint of examples/smollm2.py.")
    tokenizer.chat_template = tokenizer.chat_template.replace(SAID, SAID_AND_CALLED)
    tokenizer.response_template = CALLED
    return tokenizer


class Conversations:
    """A reward that also counts what conversations are made of: the share of characters with an even code."""

    __name__ = "even"

    def __init__(self) -> None:
        self.turns: list[int] = []
        self.answers: list[int] = []

    def __call__(self, completions: list[Any], **_: Any) -> list[float]:
        """Return one reward per conversation."""
        rewards = []
        for messages in completions:
            own = [message["content"] or "" for message in messages if message["role"] == "assistant"]
            self.turns.append(len(own))
            self.answers.append(sum(message["role"] == "tool" for message in messages))
            text = "".join(own)
            rewards.append(sum(ord(character) % 2 == 0 for character in text) / max(len(text), 1))
        return rewards


def main() -> None:
    """Train a step, and say how many turns each completion has."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_name_or_path", help="a checkpoint of examples/smollm2.py (default: the whole model)")
    parser.add_argument("--output_dir", default="runs/tools")
    options = parser.parse_args()
    model = options.model_name_or_path or str(smollm2.unpack())
    on_cpu = {} if torch.cuda.is_available() else {"use_cpu": True, "vllm_gpu_memory_utilization": 0.25}
    config = MismatchGRPOConfig(
        output_dir=options.output_dir, max_steps=1, per_device_train_batch_size=4, num_generations=4,
        max_completion_length=160, max_tool_calling_iterations=CALLS, generation_kwargs={"max_tokens": 16},
        use_vllm=True, vllm_mode="colocate", vllm_max_model_length=512, gradient_checkpointing=False, bf16=False,
        logging_steps=1, save_strategy="no", report_to="none", mismatch={"precision": {"dtype": "float32"}}, **on_cpu,
    )  # fmt: skip
    conversations = Conversations()
    trainer = MismatchGRPOTrainer(
        model=model,
        reward_funcs=conversations,
        args=config,
        train_dataset=chat.problems(4, seed=0),
        processing_class=tokenizer_with_calls(model),
        tools=[add],
    )
    trainer.train()
    print(f"turns of each completion: {conversations.turns}; answers of the tool: {conversations.answers}")
    shared.end_engine(trainer)


if __name__ == "__main__":
    main()
