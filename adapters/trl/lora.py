"""LoRA under TRL: the base keeps its weights through weight updates, and what rounding leaves of the adapters is measured.

TRL merges adapters into the base for each weight update, W + BA, and takes BA off again afterwards. In half precision the sum
is rounded and so is the difference: the base wanders, and each update starts from what the last one left (huggingface/trl#6688).
Here each layer is merged in a copy while it is sent. What the engine gets is still rounded to its grid: an adapter that
is smaller than half a unit in the last place of the weights vanishes there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Weights of the base that adapters change, and the layers of these."""

    layers: list[Any]
    weights: set[nn.Parameter]


class Base:
    """The base model of a policy that trains adapters.

    Attributes:
        rounding: The error of rounding W + BA in the last update divided by BA, as Frobenius norms over all layers; None while BA
            is 0.
    """

    def __init__(self, model: Any, engine_dtype: str) -> None:
        self._model = model
        self._grid: torch.dtype = getattr(torch, engine_dtype)
        self.rounding: float | None = None

    def with_adapters(self, send: Callable[[], Iterable[tuple[str, Tensor]]]) -> Iterator[tuple[str, Tensor]]:
        """Yield what TRL sends, with W + BA in the place of each adapted weight W.

        W itself is never changed, so that an update which is broken off leaves it as it is. Only one layer's sum is held at a
        time. Raises WeightSyncError at the end if a layer's adapters were not sent, and at once if some are merged already.
        """
        places = list(self._places())
        # TRL sends another tensor object of the same memory.
        place_of = {weight.data_ptr(): number for number, place in enumerate(places) for weight in place.weights}
        squares = torch.zeros(2, dtype=torch.float64)
        left, merges = set(range(len(places))), False
        present, merged = -1, dict[int, Tensor]()  # the place that is being sent, and its sums

        def merge(adapter_names: None = None, safe_merge: bool = False) -> None:
            nonlocal merges
            merges = True

        with shadowed(self._model, merge_adapter=merge, unmerge_adapter=lambda *_, **__: None):
            for name, parameter in send():
                number = place_of.get(parameter.data_ptr())
                if number is None or not merges:
                    yield name, parameter
                    continue
                if present != number:
                    present = number
                    merged, of_place = self._merged(places[number])
                    squares += of_place
                    left.discard(number)
                yield name, merged[parameter.data_ptr()]
        if left:
            raise WeightSyncError(
                f"TRL sent the weights of {len(left)} layers of {len(places)} without the adapters that it was to merge into "
                "them: the engine has got the base alone. Use a version of TRL that `mismatch-ext compat` names."
            )
        error, size = squares.tolist()
        self.rounding = (error / size) ** 0.5 if size > 0 else None

    def _places(self) -> Iterable[_Place]:
        """Return the weights that have adapters; layers that tie theirs are one place."""
        places: dict[nn.Parameter, _Place] = {}
        for layer, base in layers_of(self._model):
            if layer.merged_adapters:
                raise WeightSyncError(
                    f"the adapters {', '.join(layer.merged_adapters)} are merged into the base outside of a weight update; call "
                    "unmerge_adapter."
                )
            weights = list(base.parameters(recurse=False))
            place = places.setdefault(weights[0], _Place(layers=[], weights=set()))
            place.layers.append(layer)
            place.weights.update(weights)
        return places.values()

    @torch.no_grad()
    def _merged(self, place: _Place) -> tuple[dict[int, Tensor], Tensor]:
        """Return weights with their adapters, by the place of W in memory, and the squares of their error and of BA."""
        own = {weight: weight.data for weight in place.weights}
        try:
            for weight in own:
                weight.data = weight.data.clone()
            for layer in place.layers:
                layer.merge()
            merged = {values.data_ptr(): weight.data for weight, values in own.items()}
            squares = torch.stack([self._squares(layer, own) for layer in place.layers]).sum(0)
            for weight in own:
                weight.data = weight.data.clone()  # from which peft takes BA off again
            for layer in place.layers:
                layer.unmerge()
        finally:
            for weight, values in own.items():
                weight.data = values
            for layer in place.layers:
                layer.merged_adapters.clear()  # of a layer that failed: its weights are the base's again
        return merged, squares

    def _squares(self, layer: Any, own: Mapping[Any, Tensor]) -> Tensor:
        """Return the sums of squares `[2]` of what rounding changes in a merged layer, and of BA; on the CPU."""
        # Adapters of other kinds than W + BA, such as DoRA's, are left out.
        added = [name for name in layer.merged_adapters if name not in getattr(layer, "lora_variant", {name: None})]
        if not added:
            return torch.zeros(2, dtype=torch.float64)
        weight = getattr(layer.get_base_layer(), getattr(layer, "parameter_name", "weight"))
        delta = torch.stack([layer.get_delta_weight(name).float() for name in added]).sum(0)
        exact = own[weight].float() + delta
        error = weight.to(self._grid).float() - exact
        return torch.stack([error.square().sum(), delta.square().sum()]).double().cpu()
