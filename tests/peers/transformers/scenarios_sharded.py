"""Replay on sharded and replicated models, ranks over gloo."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from mismatch_ext.adapters.transformers.routing import record_routing, replay_routing
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from mismatch_ext.routing import RoutingTrace
from tests.oracles.routing.passes import another
from tests.oracles.routing.tiny import Family, families
from tests.peers.forks import on_ranks

MODES = (None, True, False)


def batch(rank: int) -> Tensor:
    """Return a rank's own tokens."""
    return torch.randint(3, 96, (2, 8), generator=torch.Generator().manual_seed(40 + rank))


def forward(model: nn.Module, rank: int) -> tuple[Tensor, Tensor]:
    """Return logits and loss of a rank's tokens."""
    logits = model(input_ids=batch(rank), use_cache=False).logits
    return logits, -logits.log_softmax(-1).gather(-1, batch(rank)[..., None]).mean()


def reference(family: Family, world: int) -> tuple[list[RoutingTrace], list[Tensor], dict[str, Tensor]]:
    """Return every rank's routing and logits, and the mean gradient, computed without sharding."""
    model = family.build()
    traces, logits, losses = [], [], []
    for rank in range(world):
        with torch.no_grad(), record_routing(model) as recording:
            forward(model, rank)
        traces.append(another(recording.trace))
        with replay_routing(model, traces[-1]):
            output, loss = forward(model, rank)
        logits.append(output.detach())
        losses.append(loss)
    torch.stack(losses).mean().backward()
    return traces, logits, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def wrapped(model: nn.Module, how: str, world: int) -> nn.Module:
    """Shard a model layer by layer, or replicate it."""
    if how == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (world,))
    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh)  # type: ignore[arg-type]
    fully_shard(model, mesh=mesh)
    return model


def rank_results(rank: int, world: int, name: str, how: str) -> dict[str, Any]:
    """Compare one rank's logits and gradients with the reference, by checkpointing mode."""
    family = next(family for family in families() if family.name == name)
    traces, logits, expected = reference(family, world)
    results = {}
    for reentrant in MODES:
        model = family.build()
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})  # type: ignore[operator]
        model = wrapped(model, how, world)
        with replay_routing(model, traces[rank]):
            got, loss = forward(model, rank)
        loss.backward()
        found = {}
        for parameter_name, parameter in model.named_parameters():
            if (grad := parameter.grad) is not None:
                whole = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
                found[parameter_name.removeprefix("module.")] = whole
        results[str(reentrant)] = {
            "logits": torch.equal(got, logits[rank]),
            "names": found.keys() == expected.keys(),
            "gradients": max(float((found[n] - g).abs().max()) for n, g in expected.items()),
        }
    return results


def on_rank(family: str, how: str) -> list[Any]:
    """Run one rank, and return what all found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, rank_results(dist.get_rank(), world, family, how))
    dist.destroy_process_group()
    return gathered


def sharded(world: int, family: str, how: str) -> list[Any]:
    """Run all ranks."""
    return on_ranks(on_rank, world, family=family, how=how)[0]
