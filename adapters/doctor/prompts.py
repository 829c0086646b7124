"""Prompts that the doctor samples from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mismatch_ext.errors import ConfigError


def read_prompts(path: Path, model: str) -> list[list[int]]:
    """Read prompts from a file and encode them with the checkpoint's tokenizer.

    Raises:
        ConfigError: The file cannot be read, has no prompt, or has a line that is not a prompt; names the line.
    """
    from mismatch_ext.adapters.transformers.peft_adapters import tokenizing
    from transformers import AutoTokenizer

    try:
        texts = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts: {path} cannot be read: {error}") from error
    numbered = [(number, line) for number, line in enumerate(texts, start=1) if line.strip()]
    if not numbered:
        raise ConfigError(f"--prompts: {path} holds no prompt; write one a line.")
    prompts: list[Any] = [line for _, line in numbered]
    if path.suffix == ".jsonl":
        prompts = [_of_json(line, f"{path}, line {number}") for number, line in numbered]
    if all(isinstance(prompt, list) for prompt in prompts):
        return prompts
    try:
        tokenizer = AutoTokenizer.from_pretrained(tokenizing(model))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model: {model} has no tokenizer for the prompts: {str(error).splitlines()[0]}") from error
    return [prompt if isinstance(prompt, list) else list(tokenizer.encode(prompt)) for prompt in prompts]


def _of_json(line: str, where: str) -> str | list[int]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--prompts: {where} is no JSON: {error}") from error
    ids = row.get("prompt_ids") if isinstance(row, dict) else None
    if isinstance(ids, list) and ids and all(type(token) is int and token >= 0 for token in ids):
        return ids
    text = row.get("prompt") if isinstance(row, dict) else None
    if not isinstance(text, str) or not text:
        raise ConfigError(f'--prompts: {where} has neither "prompt", a text, nor "prompt_ids", a list of token ids.')
    return text
