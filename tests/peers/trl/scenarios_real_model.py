"""TRL on a real vocabulary with a tied head, and chat prompts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from datasets import Dataset
from mismatch_ext.adapters.trl import MismatchGRPOConfig, MismatchGRPOTrainer, engines
from torch import nn
from transformers import AutoTokenizer

from mismatch_ext.errors import WeightSyncError
from mismatch_ext.weights import SyncVerdict, WeightVerifier
from tests.oracle import watch_float32_error
from tests.peers.trl.scenarios_training import arguments, history
from tests.peers.trl.scenarios_turns import ANSWER, Batches, add


def peek() -> str:
    """Look at nothing."""
    return "nothing"


def even(completions: list[Any], **_: Any) -> list[float]:
    """Return the share of characters with an even code, which varies between completions of any text."""
    texts = ["".join(turn["content"] for turn in turns if turn["role"] == "assistant") for turns in completions]
    return [sum(ord(character) % 2 == 0 for character in text) / max(len(text), 1) for text in texts]


def by_tokens(completions: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Return a reward in which answers of one text length differ too: equal ones in a group would have no gradient."""
    return [sum((place + 1) * token for place, token in enumerate(ids)) % 997 / 997 for ids in completion_ids]


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
    # At five times this rate, the answers of a group may be one token, and equal, by the sixth step.
    given = arguments(out, mismatch=block, vllm_max_model_length=128, max_steps=6, learning_rate=2e-4, **overrides)
    trainer = MismatchGRPOTrainer(
        model=model, reward_funcs=by_tokens, train_dataset=chats(), args=MismatchGRPOConfig(**given)
    )
    errors = watch_float32_error(trainer)
    trainer.train()
    return {
        "history": history(trainer),
        "float32_errors": errors,
        "verdicts": [[verdict.status, verdict.movement, verdict.message] for verdict in verdicts],
    }


def compute_unpacked(layer: nn.Module, remove_weight: bool) -> None:
    """Let a layer of vLLM's compute from its weights and keep them, as on a GPU, instead of packing them for a CPU."""
    layer.cpu_linear = nn.functional.linear


@contextmanager
def updated_as_on_a_gpu(lost: str) -> Iterator[list[str]]:
    """Let TRL update an engine on a CPU by its own way, tensor by tensor through the model's `load_weights`.

    Args:
        lost: Tensors with this in their names are lost on the way from the second update on; none are if it is empty.

    Yields:
        The names that the engine's model was given by TRL.
    """
    from trl.generation.vllm_generation import VLLMGeneration
    from vllm.model_executor.layers import utils
    from vllm.model_executor.models.llama import LlamaForCausalLM

    given: list[str] = []
    updates: list[int] = []
    load, sync = LlamaForCausalLM.load_weights, VLLMGeneration.sync_weights

    def counting(self: Any) -> None:
        updates.append(len(updates))
        sync(self)

    def noting(self: Any, weights: Any) -> Any:
        if not updates:  # the engine reads its checkpoint
            return load(self, weights)
        sent = list(weights)
        given.extend(name for name, _ in sent)
        return load(self, [(name, w) for name, w in sent if not (lost and lost in name and len(updates) > 1)])

    with (
        patch.object(utils, "dispatch_cpu_unquantized_gemm", compute_unpacked),
        patch.object(engines, "is_cpu", lambda llm: False),
        patch.object(VLLMGeneration, "sync_weights", counting),
        patch.object(LlamaForCausalLM, "load_weights", noting),
    ):
        yield given


def train_as_on_a_gpu(model: str, out: str, lost: str = "") -> dict[str, Any]:
    """Train as `train` does, with TRL's own weight updates, and return the error that ended it, if one did."""
    block = {"precision": {"dtype": "float32"}, "monitor": {"weight_sync": "error"}}
    with updated_as_on_a_gpu(lost) as given:
        try:
            found: dict[str, Any] = train(model, out, block)
        except WeightSyncError as error:
            found = {"error": str(error)}
    return found | {"given": len(given), "different": len(set(given))}


def train_with_tools(model: str, out: str, block: Any) -> dict[str, Any]:
    """Train a step on chat prompts whose answers call tools.

    The model's own chat template shows no calls, which TRL asks of a template, so they are added to it. Four layers ask for
    nothing: the tokenizer's response template takes whatever they say for calls, until TRL's limit ends it.
    """
    tokenizer = AutoTokenizer.from_pretrained(model)
    own, shown = "message['content'] + '<|im_end|>'", "(message.tool_calls | tojson if message.tool_calls else '')"
    assert own in tokenizer.chat_template
    tokenizer.chat_template = tokenizer.chat_template.replace(own, f"message['content'] + {shown} + '<|im_end|>'")
    tokenizer.response_template = {**ANSWER, "start_anchor": "<|im_start|>assistant\n"}
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
