"""Load checkpoints for the doctor, and read facts about a model from it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from mismatch_ext.adapters.transformers.peft_adapters import base_of, merged, whole
from mismatch_ext.adapters.transformers.routing import moe_layout
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from mismatch_ext.errors import ConfigError, ReplayError
from mismatch_ext.routing import RoutingShape


def ensure_checkpoint(option: str, path: str | Path) -> None:
    """Refuse a path that is neither a checkpoint nor an adapter of one, before anything expensive starts.

    Raises:
        ConfigError: It is neither; names the option that gave the path.
    """
    base = base_of(path)
    named = path if base is None else f"{base}, the base model of the adapter {path},"
    try:
        AutoConfig.from_pretrained(whole(path))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{option}: {named} cannot be loaded as a checkpoint of transformers: {' '.join(str(error).split())[:300]}"
        ) from error


def load_model(path: str | Path, option: str = "--model", config: Mapping[str, Any] | None = None) -> nn.Module:
    """Load a checkpoint in float32, for scoring; an adapter is merged with its base model.

    Args:
        path: Folder of the checkpoint or adapter.
        option: The option that gave the path, for messages.
        config: Fields of the checkpoint's configuration to replace, with their new values.

    Raises:
        ConfigError: There is no checkpoint, or its weights are damaged; names the option that gave the path.
    """
    try:
        model_config = AutoConfig.from_pretrained(whole(path))
        _update(model_config, config or {})
        model: nn.Module = AutoModelForCausalLM.from_pretrained(whole(path), config=model_config, dtype=torch.float32)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ConfigError(
            f"{option}: {path} cannot be loaded as a causal language model of transformers: {' '.join(str(error).split())[:300]}"
        ) from error
    return (model if base_of(path) is None else merged(model, path, option)).eval()


def _update(config: Any, changes: Mapping[str, Any]) -> None:
    """Set fields of a configuration, as verl does; a mapping sets fields of a configuration inside it."""
    for key, value in changes.items():
        if isinstance(value, Mapping) and not isinstance(getattr(config, key, None), Mapping | None):
            _update(getattr(config, key), value)
        else:
            setattr(config, key, value)


def with_room(length: int | None, model: str) -> int | None:
    """Return a maximal length in which a whole response can be scored, one more than the host's: vLLM always adds a token.

    Args:
        length: The host's maximal length, in tokens; None for the checkpoint's own.
        model: The checkpoint; its own maximal length is never exceeded.
    """
    if length is None:
        return None
    config: Any = AutoConfig.from_pretrained(whole(model))
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    return length + 1 if longest is None or length < longest else length


def routing_shape(model: nn.Module) -> RoutingShape | None:
    """Return the shape of a model's routes; None for a model without experts."""
    try:
        return moe_layout(model).shape
    except ReplayError:
        return None


def end_tokens(model: nn.Module) -> tuple[int, ...]:
    """Return the ids that end a response, as the checkpoint says."""
    ids: Any = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return () if ids is None else tuple(ids) if isinstance(ids, list | tuple) else (int(ids),)
