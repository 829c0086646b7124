"""A model's weights under the names and in the shapes of its checkpoint, which is what engines load.

When it loads a mixture of experts, transformers fuses the experts of a layer into one tensor, and renames some modules: Mixtral's
`block_sparse_moe.experts.0.w1` becomes a part of `mlp.experts.gate_up_proj`. vLLM knows the fused names of some families, and
SGLang those of almost none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

LAYER = re.compile(r"^(.*?\.layers\.\d+)\.")


def checkpoint_parameters(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield a transformers model's parameters under the names and in the shapes of its checkpoint, a layer at a time.

    transformers fuses the experts of a layer into one tensor when it loads a checkpoint; this function splits them again, as
    `save_pretrained` does. It copies the experts of one layer at a time.

    Args:
        model: A transformers model, unwrapped.
    """
    return _converted(model, ((name, parameter.detach()) for name, parameter in model.named_parameters()))


def under_checkpoint_names(model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors of a model under the names and in the shapes of its checkpoint, whoever yields them under the model's own.

    Unless the two differ, each tensor is passed on as it comes. Otherwise those of a layer are copied first, because a sharded
    trainer frees a gathered tensor as soon as it is asked for the next one.

    Args:
        model: The model, unwrapped; with PEFT, its base model.
        tensors: Names and whole tensors, those of a layer one after the other.
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel) or not _is_renamed(model):
        yield from tensors
        return
    copies = ((name, values.detach().clone()) for name, values in tensors)
    yield from _converted(model, copies)


def _converted(model: PreTrainedModel, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    from transformers.core_model_loading import revert_weight_conversion

    def layer(item: tuple[str, Tensor]) -> str:
        prefix = LAYER.match(item[0])
        return prefix[1] if prefix else ""

    for _, group in groupby(tensors, key=layer):
        with torch.no_grad():
            yield from revert_weight_conversion(model, dict(group)).items()


def _is_renamed(model: PreTrainedModel) -> bool:
    """Tell whether a model's checkpoint has other names than the model; no weight is read."""
    # DeepSpeed's stage 3 keeps the shape apart from a parameter whose values are on other ranks.
    shapes = ((name, getattr(values, "ds_shape", values.shape)) for name, values in model.named_parameters())
    own = ((name, torch.empty(tuple(shape), device="meta")) for name, shape in shapes)
    return {name for name, _ in _converted(model, own)} != {name for name, _ in model.named_parameters()}
