"""An oracle in float64, for samples for which float32 is not exact enough."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from mismatch_ext.adapters.transformers.doctor_changes import attributes
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

EXPERTS = "_experts_implementation"


@contextmanager
def in_float64(model: nn.Module) -> Iterator[None]:
    """Compute in float64 what a model's code asks to compute in float32; the model's weights must be in float64 already."""
    configs = {id(c): c for m in model.modules() if hasattr(c := getattr(m, "config", None), EXPERTS)}
    # torch's grouped matrix product of experts does not support float64.
    with attributes([(config, EXPERTS) for config in configs.values()], lambda _: "eager"), Widened():
        yield


class Widened(TorchFunctionMode):
    """Uses float64 wherever code asks for float32: norms, rotary positions, routers, softmax."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            return args[0].double()
        given = {name: _wider(value) for name, value in (kwargs or {}).items()}
        return func(*map(_wider, args), **given)


def _wider(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
