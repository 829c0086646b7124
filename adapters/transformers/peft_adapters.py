"""Adapters that peft has saved: find their base model, and merge them into it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from mismatch_ext.errors import ConfigError

CONFIG, TOKENIZER = "adapter_config.json", "tokenizer_config.json"


def base_of(path: str | Path) -> str | None:
    """Return the base model of the adapter in a folder; None if the path is not a folder with an adapter.

    Raises:
        ConfigError: The adapter does not name its base model.
    """
    described = Path(path) / CONFIG
    if not described.is_file():
        return None
    try:
        base = json.loads(described.read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{described} cannot be read: {error}") from error
    if not isinstance(base, str) or not base:
        raise ConfigError(f"{described}: base_model_name_or_path is {base!r}; write there which model was adapted.")
    return base


def whole(path: str | Path) -> str:
    """Return where a checkpoint's configuration is: the base model of an adapter, or the checkpoint itself."""
    return base_of(path) or str(path)


def tokenizing(path: str | Path) -> str:
    """Return where a checkpoint's tokenizer is: its own folder if one was saved there, otherwise an adapter's base model."""
    return str(path) if (Path(path) / TOKENIZER).is_file() else whole(path)


def merged(model: nn.Module, path: str | Path, option: str) -> nn.Module:
    """Merge an adapter into its base model.

    Args:
        model: The base model, in the dtype to merge in.
        path: Folder of the adapter.
        option: The option that named it, for messages.

    Raises:
        ConfigError: peft is missing or cannot load the adapter, or the adapter is of a kind that has no weights to merge.
    """
    try:
        from peft import PeftConfig, PeftModelForCausalLM
    except ImportError as error:
        raise ConfigError(
            f"{option}: {path} is an adapter, and peft cannot be imported ({error}); install it."
        ) from error
    try:
        adapter: Any = PeftModelForCausalLM(model, PeftConfig.from_pretrained(str(path)))
        if not hasattr(adapter.base_model, "merge_and_unload"):
            raise ValueError(f"a {adapter.active_peft_config.peft_type.value} adapter has no weights to merge")
        loaded = adapter.load_adapter(str(path), adapter.active_adapter)
        # peft itself only warns, and leaves missing tensors at their initial values, which have no effect.
        if wrong := [*loaded.missing_keys, *loaded.unexpected_keys]:
            raise ValueError(f"{len(wrong)} tensors do not fit, such as {wrong[0]}")
        result: nn.Module = adapter.merge_and_unload(safe_merge=True)
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise ConfigError(
            f"{option}: {path} cannot be merged into {base_of(path)}: {' '.join(str(error).split())[:300]}"
        ) from error
    # peft has frozen the model's parameters.
    return result.requires_grad_(True)


@contextmanager
def served(path: str, option: str) -> Iterator[str]:
    """Yield a path that an engine can load: the checkpoint itself, or a temporary folder with an adapter and its base merged.

    Args:
        path: Path of the checkpoint or adapter.
        option: The option that named it, for messages.

    Raises:
        ConfigError: The path is an adapter that cannot be merged.
    """
    base = base_of(path)
    if base is None:
        yield path
        return
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = merged(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), path, option)
    with TemporaryDirectory(prefix="merged-") as folder:
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(tokenizing(path)).save_pretrained(folder)
        del model
        yield folder
