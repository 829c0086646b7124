"""LoRA under TRL: the base keeps its weights through weight updates, and what rounding leaves of the adapters is measured.

TRL merges adapters into the base for each weight update, W + BA, and takes BA off again afterwards. In half precision the sum
is rounded and so is the difference: the base wanders, and each update starts from what the last one left (huggingface/trl#6688).
Here the base's own tensors are put back after each update. What the engine gets is still rounded to its grid: an adapter that
is smaller than half a unit in the last place of the weights vanishes there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from mismatch_ext.adapters.trl.overridden import shadowed
from torch import Tensor, nn

from mismatch_ext.errors import ConfigError, WeightSyncError


def layers_of(model: nn.Module) -> Iterator[tuple[Any, nn.Module]]:
    """Yield each layer of adapters of a `PeftModel`, with the layer of the base that it adapts."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            yield module, module.get_base_layer()


def check_base(model: nn.Module) -> None:
    """Refuse a quantized base model."""
    for _, base in layers_of(model):
        for name, weight in base.named_parameters(recurse=False):
            if not weight.is_floating_point():
                raise ConfigError(
                    f"the base model is quantized ({type(base).__name__}.{name} holds {weight.dtype}), and TRL merges adapters "
                    "into it for each weight update, rounded to its grid. Load the base in bfloat16, float16 or float32."
                )


def check_tied(model: Any) -> None:
    """Refuse adapters on one of two tied layers, the embeddings and the output head, for which an engine has one tensor."""
    from peft.tuners.lora import LoraLayer
    from peft.utils import ModulesToSaveWrapper

    config: Any = model.config
    if not config.get_text_config().tie_word_embeddings:
        return
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        if isinstance(layer, LoraLayer | ModulesToSaveWrapper):
            raise ConfigError(
                "the adapters change the embeddings or the output head of a model that ties the two. The trainer then has two "
                "different tensors, and the engine has one for both. Remove 'embed_tokens' and 'lm_head' from target_modules and "
                "modules_to_save."
            )


def check_head(model: Any) -> None:
    """Refuse a head in float32 for adapters on a model that ties it: TRL looks for the embeddings where adapters hide them."""
    if model.config.get_text_config().tie_word_embeddings:
        raise ConfigError(
            "mismatch.precision.head with adapters on a model that ties its output head to the embeddings: TRL's "
            "cast_lm_head_to_fp32 fails there. Remove mismatch.precision.head, or train without adapters."
        )


class Base:
    """The base model of a policy that trains adapters."""

    def __init__(self, model: Any, engine_dtype: str) -> None:
        self._model = model
        self._grid: torch.dtype = getattr(torch, engine_dtype)
        self._kept: dict[nn.Parameter, Tensor] = {}  # by identity; a tied weight is one
        # The error of rounding W + BA in the last update divided by BA, as Frobenius norms over all layers; None while BA is 0.
        self.rounding: float | None = None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Put the base's weights back, bit for bit, when a merge in a block is undone."""
        merge, unmerge = self._model.merge_adapter, self._model.unmerge_adapter
        restored = False

        def merged(*args: Any, **kwargs: Any) -> None:
            for _, base in layers_of(self._model):
                for weight in base.parameters(recurse=False):
                    # A frozen weight is copied once, and to the host, because a device may have no room for it.
                    if weight not in self._kept or weight.requires_grad:
                        self._kept[weight] = weight.detach().to("cpu", copy=True)
            merge(*args, **kwargs)
            self.rounding = self._rounding()

        def unmerged(*args: Any, **kwargs: Any) -> None:
            nonlocal restored
            unmerge(*args, **kwargs)
            for _, base in layers_of(self._model):
                for weight in base.parameters(recurse=False):
                    weight.data.copy_(self._kept[weight])
            restored = True

        with shadowed(self._model, merge_adapter=merged, unmerge_adapter=unmerged):
            yield
        if not restored:
            raise WeightSyncError(
                "TRL sent the weights of a model with adapters without its merge_adapter and unmerge_adapter: the engine has got "
                "the base alone, or the base was changed. Use a version of TRL that `mismatch-ext compat` names."
            )

    @torch.no_grad()
    def _rounding(self) -> float | None:
        error = size = 0.0
        for layer, base in layers_of(self._model):
            # Adapters of other kinds than W + BA, such as DoRA's, are left out.
            added = [name for name in layer.merged_adapters if name not in getattr(layer, "lora_variant", {name: None})]
            if not added:
                continue
            weight = getattr(base, getattr(layer, "parameter_name", "weight"))
            delta = torch.stack([layer.get_delta_weight(name).float() for name in added]).sum(0)
            exact = self._kept[weight].to(weight.device).float() + delta
            error += float((weight.to(self._grid).float() - exact).square().sum())
            size += float(delta.square().sum())
        return (error / size) ** 0.5 if size > 0 else None
