"""Prompts of a data set, with the chat template applied as a host applies it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from mismatch_ext.adapters.doctor.hosts import Dataset

from mismatch_ext.errors import ConfigError

KINDS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv"}


def read_dataset(asked: Dataset, model: str, rows: int) -> list[list[int]]:
    """Read prompts and encode them as a host does: messages by the chat template, texts by the tokenizer.

    Args:
        asked: The data set, and how the host reads it.
        model: Checkpoint whose tokenizer encodes the prompts.
        rows: Largest number of prompts; the first ones are read.

    Raises:
        ConfigError: The data set, its column or a usable prompt in it is missing, or the tokenizer has no chat template; names
            the option or setting that asked for the data set.
    """
    dataset = _loaded(asked)
    if asked.column not in dataset.column_names:
        raise ConfigError(
            f"{asked.option}: {', '.join(asked.paths)} has no column {asked.column!r}, but {', '.join(dataset.column_names)}; "
            "write the prompts to a file for --prompts."
        )
    tokenizer = _tokenizer(asked, model)
    prompts: list[list[int]] = []
    for number, prompt in enumerate(dataset[asked.column]):
        if len(prompts) == rows:
            break
        ids = _encoded(tokenizer, prompt, asked, number)
        if asked.longest is None or len(ids) <= asked.longest:
            prompts.append(ids)
    if not prompts:
        raise ConfigError(
            f"{asked.option}: {', '.join(asked.paths)} holds no prompt of at most {asked.longest} tokens."
        )
    return prompts


def with_own(asked: Dataset | None, path: str) -> Dataset:
    """Return the data set that `--dataset` names, read as the host reads its own."""
    plain = Dataset(paths=(path,)) if asked is None else asked
    return replace(plain, paths=(path,), option="--dataset", config=None)


def _loaded(asked: Dataset) -> Any:
    from datasets import load_dataset, load_from_disk

    paths = [str(Path(path).expanduser()) for path in asked.paths]
    try:
        if (kind := KINDS.get(Path(paths[0]).suffix)) is not None:
            return load_dataset(kind, data_files=paths, split="train")
        if Path(paths[0], "dataset_info.json").is_file():
            return load_from_disk(paths[0])
        return load_dataset(paths[0], name=asked.config, split=asked.split)
    except Exception as error:  # each format's reader raises errors of its own classes
        raise ConfigError(
            f"{asked.option}: {', '.join(asked.paths)} cannot be read as a data set: {' '.join(str(error).split())[:300]}"
        ) from error


def _tokenizer(asked: Dataset, model: str) -> Any:
    from mismatch_ext.adapters.transformers.peft_adapters import tokenizing
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(tokenizing(model))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model: {model} has no tokenizer for the prompts: {str(error).splitlines()[0]}") from error
    if asked.template is not None:
        tokenizer.chat_template = asked.template
    return tokenizer


def _encoded(tokenizer: Any, prompt: Any, asked: Dataset, number: int) -> list[int]:
    if isinstance(prompt, str) and prompt:
        return list(tokenizer(prompt)["input_ids"])
    if not isinstance(prompt, list) or not prompt:
        raise ConfigError(
            f"{asked.option}: row {number} of column {asked.column!r} is neither a text nor a list of messages."
        )
    try:
        made = tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, tokenize=True, return_dict=True, **asked.template_arguments
        )
    except Exception as error:  # jinja2 raises errors of its own classes
        why = " ".join(str(error).split())[:300].rstrip(".")
        raise ConfigError(
            f"{asked.option}: row {number}: the chat template cannot be applied: {why}. "
            "Write the prompts to a file for --prompts."
        ) from error
    return list(made["input_ids"])
