"""vLLM's plugin: what a server of a trainer answers beside its own endpoints.

vLLM calls `register` in each of its processes, in those of every engine. It does nothing unless the server has its development
endpoints, over which a trainer updates weights: VLLM_SERVER_DEV_MODE=1.
"""

from __future__ import annotations

BACKEND = "mismatch_http"
"""Name of the weight transfer in the bodies of requests, for `--weight-transfer-config`."""


def register() -> None:
    """Add the weight transfer to vLLM's own, and the methods that read a worker back to its workers."""
    from vllm import envs

    if not envs.VLLM_SERVER_DEV_MODE:
        return
    from mismatch_ext.adapters.vllm.server.readback import METHODS
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.v1.worker.worker_base import WorkerBase

    # vLLM may load its plugins several times in a process.
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "mismatch_ext.adapters.vllm.server.transfer", "HttpWeightTransferEngine"
        )
    for name, method in METHODS.items():
        if not hasattr(WorkerBase, name):
            setattr(WorkerBase, name, method)
