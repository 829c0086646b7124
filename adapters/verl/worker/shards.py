"""What a rank holds of the actor under verl's FSDP1 and FSDP2 engines: its shards by the weights' own names."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.distributed.fsdp import FlatParameter, FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


def named_shards(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield this rank's part of each weight, under the name that the checkpoint has for it; nothing is gathered.

    FSDP1 lays the weights of a layer end to end in one flat parameter, of which each rank has a piece. That begins and ends
    wherever it happens to, and a weight that lies in no part of it is not yielded.

    Args:
        model: A model, wrapped by FSDP1 or FSDP2 or not at all.
    """
    for name, parameter in model.named_parameters():
        if isinstance(parameter, FlatParameter):
            yield from _parts(name, parameter)
        elif parameter.numel():
            yield _plain(name), (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()


def _parts(name: str, flat: FlatParameter) -> Iterator[tuple[str, Tensor]]:
    """Split a rank's piece of a flat parameter at the bounds of its weights, leaving out what fills it up."""
    prefix = name.rpartition(".")[0]
    for own, place in zip(flat._fqns, flat._shard_param_infos, strict=True):
        if place.in_shard:
            assert place.offset_in_shard is not None and place.numel_in_shard is not None
            whole = _plain(f"{prefix}.{own}" if prefix else own)
            yield whole, flat.detach()[place.offset_in_shard : place.offset_in_shard + place.numel_in_shard]


def _plain(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def reshard(model: nn.Module) -> None:
    """Free the gathered weights of a forward pass that no backward pass follows.

    Args:
        model: A model, wrapped by FSDP1 or FSDP2.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
        elif isinstance(module, FullyShardedDataParallel) and module._handle is not None:
            # On one rank there is one shard, and nothing was gathered.
            module._handle.reshard(module._handle.uses_sharded_strategy)
