"""Receive weights in the bodies of requests: slower than NCCL, but the only way into a server that computes on a CPU."""

from __future__ import annotations

import base64
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from mismatch_ext.adapters.vllm.head import repack_tied_heads
from mismatch_ext.patches.vllm.cpu_moe_repack import cpu_moe_repack
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from mismatch_ext.patching import applied


@dataclass
class HttpInit(WeightTransferInitInfo):
    """Empty, because nothing has to be agreed on before the first update."""


@dataclass
class HttpUpdate(WeightTransferUpdateInfo):
    """Some of the tensors of a weight update.

    Args:
        names: Their names in the checkpoint.
        dtypes: Names of their dtypes.
        shapes: Their shapes.
        data: Their bytes in base64.
    """

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    data: list[str]


class HttpWeightTransferEngine(WeightTransferEngine[HttpInit, HttpUpdate]):
    """Takes the weights of an update from requests, and loads them layer by layer as vLLM's own engines do."""

    init_info_cls = HttpInit
    update_info_cls = HttpUpdate

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._repairs = ExitStack()

    def init_transfer_engine(self, init_info: HttpInit) -> None:
        """Do nothing: there is no group to join."""

    def start_weight_update(self) -> None:
        """Prepare each layer for new weights; on a CPU, also apply the patch that repacks experts."""
        self._repairs.close()  # those of an update that failed
        if self.device.type == "cpu":
            self._repairs.enter_context(applied(*cpu_moe_repack()))
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load some tensors; vLLM's own method then waits for an accelerator, which a CPU server does not have."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: HttpUpdate) -> None:
        """Load the tensors of a request."""
        info = update_info
        sent = zip(info.names, info.dtypes, info.shapes, info.data, strict=True)
        loaded = ((name, _tensor(dtype, shape, data).to(self.device)) for name, dtype, shape, data in sent)
        self.model.load_weights(loaded)  # type: ignore[operator]

    def finish_weight_update(self) -> None:
        """Pack the complete layers, as after the first load, and on a CPU the output heads that are tied to the embeddings."""
        try:
            finalize_layerwise_reload(self.model, self.model_config)
            if self.device.type == "cpu":
                repack_tied_heads(self.model)
        finally:
            self._repairs.close()

    def shutdown(self) -> None:
        """Take off the patches of an update that was not finished."""
        self._repairs.close()


def _tensor(dtype: str, shape: list[int], data: str) -> torch.Tensor:
    raw = bytearray(base64.b64decode(data))
    return torch.frombuffer(raw, dtype=getattr(torch, dtype)).view(shape)
