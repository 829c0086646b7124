"""A tiny random model of every mixture-of-experts family that the installed transformers has.

Families are found by what their modeling code reads from a config, not by name. Sizes are set by the names of the config's
fields, which families share; tiny.toml has them, and what cannot be guessed.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

VOCABULARY = 96
_DATA = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_EXPERTS: dict[str, int] = _DATA["experts"]
_SIZES: dict[str, Any] = _DATA["experts"] | _DATA["sizes"]
SPECIAL: dict[str, dict[str, Any]] = _DATA["special"]
VARIANTS: dict[str, dict[str, dict[str, Any]]] = _DATA["variants"]


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family, or a variant of it.

    Args:
        name: `model_type`, and the variant in brackets.
        config: Its config class.
        model: The class that is built: the causal language model, or else the text backbone.
        settings: What is set beyond the sizes that all families share.
    """

    name: str
    config: type[PreTrainedConfig]
    model: type[PreTrainedModel]
    settings: dict[str, Any]

    def sized(self) -> PreTrainedConfig:
        """Return its config, of the sizes that all families share."""
        known = {field.name: field.default for field in dataclasses.fields(self.config)}
        sizes = {name: size for name, size in _SIZES.items() if name in known}
        # Noise would make two passes differ.
        sizes |= {
            name: 0.0
            for name, default in known.items()
            if isinstance(default, float) and re.search("dropout|jitter", name)
        }
        return self.config(**{**sizes, **self.settings})

    def build(self, dtype: torch.dtype = torch.float32, *, experts: str | None = None) -> nn.Module:
        """Return a model in training mode, with the same random weights at every call.

        Args:
            dtype: Of parameters and buffers.
            experts: Implementation of the experts: "eager", "batched_mm", "grouped_mm"; None for eager where it can be set.
        """
        config = self.sized()
        config._experts_implementation = experts or "eager"
        with torch.random.fork_rng(
            devices=[]
        ):  # vectors keep what the family initializes them with, which may be random
            torch.manual_seed(1)
            built = self.model._from_config(config, attn_implementation="eager", dtype=torch.float32)
        model: nn.Module = built.to(dtype).train()
        randomise(model)
        return model


def randomise(model: nn.Module) -> None:
    """Give a model random weights, the same at every call."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(0.15 * torch.randn(parameter.shape, generator=generator))
        for name, buffer in model.named_buffers():
            # Zero at initialization; random, a bias that only selects shows whether it also weighs.
            if name.endswith("bias") and buffer.is_floating_point():
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))


def families() -> Iterator[Family]:
    """Yield every family of the installed transformers whose modeling code reads a number of experts."""
    reads = re.compile(rf"config\.({'|'.join(_EXPERTS)})\b")
    for path in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        if not reads.search(path.read_text(encoding="utf-8")):
            continue
        module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
        for config, models in _models(module).items():
            fields = {field.name for field in dataclasses.fields(config)} | {*(config.attribute_map or {})}
            if not config.model_type or not (fields & {*_EXPERTS} or "ffn_config" in fields):
                continue
            model, settings = min(models, key=_preference), SPECIAL.get(config.model_type, {})
            yield Family(name=config.model_type, config=config, model=model, settings=settings)
            for variant, more in VARIANTS.get(config.model_type, {}).items():
                name = f"{config.model_type} ({variant})"
                yield Family(name=name, config=config, model=model, settings={**settings, **more})


def _models(module: Any) -> dict[type[PreTrainedConfig], list[type[PreTrainedModel]]]:
    """Return the model classes of a module by config."""
    found: dict[type[PreTrainedConfig], list[type[PreTrainedModel]]] = {}
    for value in vars(module).values():
        if not inspect.isclass(value) or not issubclass(value, PreTrainedModel) or value.__module__ != module.__name__:
            continue
        config: Any = getattr(value, "config_class", None)
        if config is not None and not value.__name__.endswith("PreTrainedModel"):
            found.setdefault(config, []).append(value)
    return found


def _preference(model: type[PreTrainedModel]) -> int:
    order = ("ForCausalLM", "TextModel", "Model", "ForConditionalGeneration")
    return next((rank for rank, ending in enumerate(order) if model.__name__.endswith(ending)), len(order))
