"""Weights that are spread over ranks, by FSDP2 or by DeepSpeed's third stage: what a rank holds, and a digest of all of it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from mismatch_ext.adapters.torch.shards import reshard
from torch import Tensor, nn

ZERO3 = 3


def zero_stage(accelerator: Accelerator) -> int | None:
    """Return the stage of DeepSpeed's ZeRO, and None where DeepSpeed does not train."""
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    return None if plugin is None else int(plugin.zero_stage)


def is_sharded(accelerator: Accelerator) -> bool:
    """Tell whether no rank holds all of the weights."""
    return zero_stage(accelerator) == ZERO3 or getattr(accelerator.state, "fsdp_plugin", None) is not None


def held(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield names and what this rank holds of each parameter: all of it, or its shard.

    Args:
        model: The model, unwrapped.
    """
    # FSDP2 keeps whole weights of the outermost module for a backward pass that may never come.
    reshard(model)
    for name, parameter in model.named_parameters():
        # Outside of a pass the parameter itself is empty under ZeRO-3.
        yield name, getattr(parameter, "ds_tensor", parameter)


def gathered(model: nn.Module, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Yield names and whole parameters, one after the other on a device; every rank takes part where they are sharded.

    Args:
        model: The model, unwrapped; FSDP2 has not sharded it yet.
        device: Where the parameters are to be looked at.
    """
    for name, parameter in model.named_parameters():
        with _whole(parameter):
            yield name, parameter.detach().to(device) if parameter.is_floating_point() else parameter


def _whole(parameter: Tensor) -> AbstractContextManager[Any]:
    if not hasattr(parameter, "ds_tensor"):
        return nullcontext()
    import deepspeed

    gathering: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters([parameter])
    return gathering


def same_everywhere(accelerator: Accelerator) -> Callable[[str], str]:
    """Return a function that joins the digests of all ranks, which each hold a part, into one; every rank calls it."""

    def join(digest: str) -> str:
        return hashlib.blake2b("".join(gather_object([digest])).encode(), digest_size=16).hexdigest()

    return join if is_sharded(accelerator) and accelerator.num_processes > 1 else lambda digest: digest
