"""One rank's pass fails in the middle, while the others are in a collective of the host's."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.peers.forks import on_ranks
from tests.peers.verl.in_process.workers import R2, batch, worker

SHORT = timedelta(seconds=20)


def failing_pass(model: str) -> dict[str, Any]:
    """Run out of memory on rank 0 while rank 1 waits for it in a collective, both inside the batch's context."""
    replay = worker(model, {"routing": R2}).engine.replay
    dist.barrier()
    # Nobody waits for longer in what this package calls.
    dist.distributed_c10d._set_pg_timeout(SHORT, dist.group.WORLD)
    rank = dist.get_rank()
    shared, said = torch.ones(1000), "nothing"
    try:
        with replay.batch(batch(range(4)), rank=rank, forward_only=True, reference=False):
            if rank == 0:
                raise RuntimeError("out of memory")
            # The host's own collective: it must meet the host's on the other rank, and nothing of this package's.
            dist.all_reduce(shared)
            replay._prepared = 4
            raise RuntimeError("the other rank's pass failed")
    except RuntimeError as error:
        said = str(error)
    if rank == 0:
        dist.all_reduce(shared)  # so that rank 1 goes on
    return {"said": said, "shared": float(shared.sum())}


def failing_pass_on_two(model: str) -> list[dict[str, Any]]:
    """Run `failing_pass` on two ranks."""
    return on_ranks(failing_pass, 2, model=model)
