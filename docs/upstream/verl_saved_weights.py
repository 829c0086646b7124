"""Weights that `separate_async` puts aside are the live ones where FSDP2's shards lie on the host: π_old follows the policy."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from verl.utils.fsdp_utils import fsdp2_sharded_save_to_cpu

PEER = "verl"
REPORTED = "not reported"
WORKAROUND = "`MismatchDetachWorker.copy_handler` (adapters/verl/worker.py) copies them"
EXPECTED = 0.0


def seen(save=fsdp2_sharded_save_to_cpu) -> float:
    """Return how far the saved weights move when the live ones move by 1."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = fully_shard(torch.nn.Linear(2, 2), mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
    saved, _ = save(model)
    before = {name: shard.clone() for name, (shard, _) in saved.items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1
    return max(float((saved[name][0] - before[name]).abs().max()) for name in before)


def with_workaround() -> float:
    from types import SimpleNamespace as Of

    from mismatch_ext.adapters.verl.worker import MismatchDetachWorker

    worker = object.__new__(MismatchDetachWorker)
    vars(worker).update(config=Of(actor=Of(strategy="fsdp2")), _strategy_handlers=None, _checks=Of(acts=True))
    return seen(worker.copy_handler)


if __name__ == "__main__":
    from docs.upstream.shown import main

    main(globals())
