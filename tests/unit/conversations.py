"""Conversations for tests of `mismatch_ext.chains`: real chat templates with a small tokenizer, and calls of an engine."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mismatch_ext.adapters.transformers.chat import TokenizerChat
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).resolve().parents[1] / "data" / "chat_templates"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXTS = (
    "The quick brown fox jumps over the lazy dog. How much is seventeen plus twenty-five? It is forty-two.",
    "Paris is the capital of France, and the weather there is mild. Where is Berlin? Berlin is in Germany.",
    "system user assistant tool You are a helpful AI assistant named SmolLM, trained by Hugging Face",
    '<think>\nI add the two numbers.\n</think>\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>',
)
QUESTIONS = ("How much is seventeen plus twenty-five?", "Where is Berlin?", "What is the capital of France?")
ANSWERS = ("It is forty-two.", "Berlin is in Germany.", "Paris is the capital.")

Message = dict[str, Any]


@functools.cache
def tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of 400 byte pairs with one of the two chat templates."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(TEXTS, trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>", additional_special_tokens=SPECIAL
    )
    made.chat_template = (TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8")
    return made


def chat_of(template: str) -> TokenizerChat:
    """Return the same as `mismatch_ext.chains` asks for it."""
    return TokenizerChat(tokenizer(template))


def user(text: str) -> Message:
    """Return a message."""
    return {"role": "user", "content": text}


def assistant(text: str, **further: Any) -> Message:
    """Return a message."""
    return {"role": "assistant", "content": text, **further}


def call(
    chat: TokenizerChat,
    messages: Sequence[Message],
    answer: str,
    *,
    prompt: str | None = None,
    prompt_ids: Sequence[int] | None = None,
    response_ids: Sequence[int] | None = None,
    tools: list[Any] | None = None,
    name: str = "talk",
    **further: Any,
) -> dict[str, Any]:
    """Return the line of one call; its prompt is the template's rendering unless one is given."""
    settings = further.get("chat_template_kwargs", {})
    text = chat.render(messages, tools=tools, add_generation_prompt=True, **settings) if prompt is None else prompt
    return {
        "conversation": name,
        "messages": list(messages),
        "prompt_ids": chat.encode(text) if prompt_ids is None else list(prompt_ids),
        "response_ids": chat.encode(answer + "<|im_end|>") if response_ids is None else list(response_ids),
        **({} if tools is None else {"tools": tools}),
        **further,
    }


def long_talk(turns: int) -> list[Message]:
    """Return the messages of a conversation."""
    messages: list[Message] = []
    for turn in range(turns):
        messages += [user(f"{QUESTIONS[turn % 3]} ({turn})"), assistant(f"{ANSWERS[turn % 3]} ({turn})")]
    return messages


def clean_calls(chat: TokenizerChat, turns: int) -> list[dict[str, Any]]:
    """Return the calls of a conversation whose every turn extends the one before."""
    messages = long_talk(turns)
    return [call(chat, messages[:place], messages[place]["content"]) for place in range(1, 2 * turns, 2)]
