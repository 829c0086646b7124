"""TRL on a real vocabulary with a tied head, and chat prompts."""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from mismatch_ext.adapters.trl import MismatchGRPOConfig, MismatchGRPOTrainer
from transformers import AutoTokenizer

from mismatch_ext.weights import SyncVerdict, WeightVerifier
from tests.oracle import watch_float32_error
from tests.peers.trl.scenarios_training import arguments, history
from tests.peers.trl.scenarios_turns import SCHEMA, Batches, add


def peek() -> str:
    """Look at nothing."""
    return "nothing"


def even(completions: list[Any], **_: Any) -> list[float]:
    """Return the share of characters with an even code, which varies between completions of any text."""
    texts = ["".join(turn["content"] for turn in turns if turn["role"] == "assistant") for turns in completions]
    return [sum(ord(character) % 2 == 0 for character in text) / max(len(text), 1) for text in texts]


def chats() -> Dataset:
    """Return chat prompts of different lengths."""
    return Dataset.from_dict(
        {"prompt": [[{"role": "user", "content": f"What is {n} + {7 * n}? Answer with a number."}] for n in range(24)]}
    )


def train(model: str, out: str, block: Any, **overrides: Any) -> dict[str, Any]:
    """Train six steps on chat prompts, with more arguments of TRL's, and note what is found of each weight update."""
    verdicts: list[SyncVerdict] = []
    judge = WeightVerifier.judge

    def noting(self: WeightVerifier, *args: Any, **kwargs: Any) -> SyncVerdict:
        verdicts.append(judge(self, *args, **kwargs))
        return verdicts[-1]

    WeightVerifier.judge = noting  # type: ignore[method-assign]
    trainer = MismatchGRPOTrainer(
        model=model, reward_funcs=even, train_dataset=chats(),
        args=MismatchGRPOConfig(**arguments(out, mismatch=block, vllm_max_model_length=128, max_steps=6, **overrides)),
    )  # fmt: skip
    errors = watch_float32_error(trainer)
    trainer.train()
    return {
        "history": history(trainer),
        "float32_errors": errors,
        "verdicts": [[verdict.status, verdict.movement, verdict.message] for verdict in verdicts],
    }


def train_with_tools(model: str, out: str, block: Any) -> dict[str, Any]:
    """Train a step on chat prompts whose answers call tools.

    The model's own chat template shows no calls, which TRL asks of a template, so they are added to it. Four layers ask for
    nothing: the tokenizer's response schema takes whatever they say for calls, until TRL's limit ends it.
    """
    tokenizer = AutoTokenizer.from_pretrained(model)
    own, shown = "message['content'] + '<|im_end|>'", "(message.tool_calls | tojson if message.tool_calls else '')"
    assert own in tokenizer.chat_template
    tokenizer.chat_template = tokenizer.chat_template.replace(own, f"message['content'] + {shown} + '<|im_end|>'")
    tokenizer.response_schema = SCHEMA
    given = arguments(
        out, mismatch=block, vllm_max_model_length=256, max_steps=1, max_completion_length=160,
        max_tool_calling_iterations=2, generation_kwargs={"max_tokens": 5},
    )  # fmt: skip
    trainer = MismatchGRPOTrainer(
        model=model, reward_funcs=even, train_dataset=chats(), tools=[add, peek], processing_class=tokenizer,
        args=MismatchGRPOConfig(**given),
    )  # fmt: skip
    errors, batches = watch_float32_error(trainer), Batches(trainer)
    trainer.train()
    return {"history": history(trainer), "float32_errors": errors, "batches": batches.found}
