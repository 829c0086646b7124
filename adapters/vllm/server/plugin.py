"""This package's vLLM plugin: what a trainer's server answers besides vLLM's own endpoints.

vLLM calls `register` in each process of every engine. `register` does nothing unless the server has its development endpoints,
over which a trainer updates weights: VLLM_SERVER_DEV_MODE=1.
"""

from __future__ import annotations

BACKEND = "mismatch_http"
"""Name of the backend that transfers weights in the bodies of requests, for `--weight-transfer-config`."""


def register() -> None:
    """Register the weight transfer with vLLM, and add the methods that read a worker back to vLLM's worker class."""
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
