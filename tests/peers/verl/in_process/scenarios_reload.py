"""verl's update of a vLLM that quantizes while it loads, by vLLM's own reload, on a model of one layer."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import tests.peers.verl.in_process  # noqa: F401 - first: it says how verl runs here
from mismatch_ext.errors import EngineError
from tests.peers.engines.vllm_server import named_vllm


class Scaled(nn.Module):
    """A layer with a parameter and, as Gemma 4 has it, a scale that is a buffer; parameters alone have loaders."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(2, 2, bias=False)
        self.register_buffer("layer_scalar", torch.full((1,), 1e-3))

    def load_weights(self, weights: Any) -> None:
        """Load parameters, as vLLM's models do."""
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        held = dict(self.named_parameters())
        for name, tensor in weights:
            getattr(held[name], "weight_loader", default_weight_loader)(held[name], tensor)


class OnlineQuantizationConfig:
    """Named as vLLM's, by which the extension knows it."""


class Receiver:
    """Hands over each tensor in a buffer that is used again, as verl's does."""

    sent: dict[str, Tensor]

    def __init__(self, **_: Any) -> None:
        pass

    def receive_weights(self, on_bucket_received: Any) -> None:
        """Hand over all that was sent."""
        for number, (name, tensor) in enumerate(self.sent.items()):
            buffer = tensor.clone()
            on_bucket_received([(name, buffer)], number == len(self.sent) - 1)
            buffer.fill_(float("nan"))


def updates(folder: str, sent: list[dict[str, float]], lost: bool = False) -> list[Any]:
    """Send updates, each with the value that a tensor is full of, and return what the model holds after each.

    Args:
        folder: For the name that vLLM is installed by.
        sent: Values by tensor.
        lost: Whether the reload drops the buffer.
    """
    sys.path.insert(0, named_vllm(Path(folder)))
    from mismatch_ext.adapters.verl.rollout import vllm_extension
    from verl.workers.rollout.vllm_rollout import bucketed_weight_transfer, utils
    from vllm.model_executor.model_loader import reload

    model = Scaled()
    reload.record_metadata_for_reloading(model)
    worker: Any = object.__new__(vllm_extension.RolloutExtension)
    worker.mismatch_acts = True
    of_model = SimpleNamespace(dtype=torch.float32)
    config = {"quant_config": OnlineQuantizationConfig(), "speculative_config": None, "model_config": of_model}
    worker.model_runner = SimpleNamespace(model=model, vllm_config=SimpleNamespace(**config))
    worker._get_zmq_handle = lambda: ""
    worker.device, worker._is_qat_model, worker._is_modelopt_qat = torch.device("cpu"), False, False
    found: list[Any] = []
    with (
        mock.patch.object(bucketed_weight_transfer, "BucketedWeightReceiver", Receiver),
        mock.patch.object(utils, "patch_vllm_moe_model_weight_loader", lambda model: None),
    ):
        finalize = reload.finalize_layerwise_reload

        def drop(model: Any, *rest: Any) -> None:
            finalize(model, *rest)
            del model.layer_scalar

        reload.finalize_layerwise_reload = drop if lost else finalize
        for values in sent:
            shapes = {name: tensor.shape for name, tensor in Scaled().state_dict().items()}
            Receiver.sent = {name: torch.full(shapes[name], value) for name, value in values.items()}
            try:
                worker.update_weights_from_ipc()
            except EngineError as error:
                return [*found, str(error)]
            found.append({name: tensor.unique().tolist() for name, tensor in model.state_dict().items()})
    return found
