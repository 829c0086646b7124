"""The worker of verl's `separate_async`, which puts weights aside: between two weight updates π_old stays that of the first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mismatch_ext.adapters.verl.worker.actor import MismatchWorker
from torch import Tensor, nn
from verl.experimental.separation.engine_workers import DetachActorWorker


class MismatchDetachWorker(MismatchWorker, DetachActorWorker):
    """verl's worker with the block, whose copies of the weights are real copies wherever the weights lie."""

    @property
    def copy_handler(self) -> Callable[..., Any]:
        """Return the function that copies an engine's weights to the host.

        verl 0.9.1 takes `tensor.cpu()` of FSDP2's shards, which is the tensor itself where parameters are on the host already
        (`param_offload`, `offload_policy`, a CPU): the update then changes the copy, and π_old of the next mini-batch is the
        present policy.
        """
        handler = super().copy_handler
        if self.config.actor.strategy != "fsdp2" or self._verdicts.observes:
            return handler

        def copied(module: nn.Module) -> tuple[dict[str, tuple[Tensor, Any]], Any]:
            shards, spec = handler(module)
            # A rank without a piece of a tensor has no storage of it, on either side.
            live = {_storage(parameter) for parameter in module.parameters()} - {0}
            return {
                name: (shard.clone() if _storage(shard) in live else shard, of) for name, (shard, of) in shards.items()
            }, spec

        return copied


def _storage(tensor: Tensor) -> int:
    """Return where a tensor's numbers lie, or a sharded one's own; 0 where there are none."""
    return int(getattr(tensor, "_local_tensor", tensor).untyped_storage().data_ptr())
