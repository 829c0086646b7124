"""A rank's shards of a model that FSDP1 or FSDP2 of torch has wrapped, by the weights' own names."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.distributed.fsdp import FlatParameter, FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from mismatch_ext.weights import Piece

WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


def local(parameter: Tensor) -> Tensor:
    """Return what this rank holds of a parameter, without its gradient."""
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()


def named_shards(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield this rank's part of each weight, under the name that the checkpoint has for it; nothing is gathered.

    FSDP1 lays the weights of a layer end to end in one flat parameter, and each rank has a piece of it. A piece may begin and end
    in the middle of a weight. A weight of which the piece has nothing is not yielded.

    Args:
        model: A model, wrapped by FSDP1 or FSDP2 or not at all.
    """
    for name, parameter in model.named_parameters():
        if isinstance(parameter, FlatParameter):
            yield from _parts(name, parameter)
        elif parameter.numel():
            yield _plain(name), local(parameter)


def named_pieces(model: nn.Module) -> Iterator[tuple[str, Piece]]:
    """Yield this rank's part of each weight, and where it lies in the whole.

    Weights that are cut along columns are left out. Nothing is yielded of a model under FSDP1 with `use_orig_params` on several
    ranks, because FSDP1 does not say there where its parts lie.

    Args:
        model: A model, wrapped by FSDP1 or FSDP2 or not at all.
    """
    for module in model.modules():
        handle = module._handle if isinstance(module, FullyShardedDataParallel) else None
        if handle is not None and handle._use_orig_params and handle.uses_sharded_strategy:
            return
    for name, parameter in model.named_parameters():
        if isinstance(parameter, FlatParameter):
            starts = [place.intra_param_start_idx for place in parameter._shard_param_infos if place.in_shard]
            shapes = [
                shape
                for shape, place in zip(parameter._shapes, parameter._shard_param_infos, strict=True)
                if place.in_shard
            ]
            for (weight_name, values), start, shape in zip(_parts(name, parameter), starts, shapes, strict=True):
                assert start is not None
                yield weight_name, Piece(values=values, start=start, shape=tuple(shape))
        elif isinstance(parameter, DTensor):
            if all(type(kind) is Replicate or kind == Shard(0) for kind in parameter.placements):
                _, offsets = compute_local_shape_and_global_offset(
                    parameter.shape, parameter.device_mesh, parameter.placements
                )
                values = local(parameter)
                start = offsets[0] * (values[:1].numel() if values.numel() else 0)
                yield _plain(name), Piece(values=values.reshape(-1), start=start, shape=tuple(parameter.shape))
        else:
            yield _plain(name), Piece(values=parameter.detach().reshape(-1), start=0, shape=tuple(parameter.shape))


def _parts(name: str, flat: FlatParameter) -> Iterator[tuple[str, Tensor]]:
    """Split a rank's piece of a flat parameter at the bounds of its weights; padding is left out."""
    prefix = name.rpartition(".")[0]
    for weight_name, place in zip(flat._fqns, flat._shard_param_infos, strict=True):
        if place.in_shard:
            assert place.offset_in_shard is not None and place.numel_in_shard is not None
            whole = _plain(f"{prefix}.{weight_name}" if prefix else weight_name)
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
            # On one rank there is only one shard: nothing was gathered, and nothing is freed.
            module._handle.reshard(module._handle.uses_sharded_strategy)
