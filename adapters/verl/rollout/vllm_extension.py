"""What runs inside the workers of verl's vLLM server."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from mismatch_ext.adapters import compat
from mismatch_ext.adapters.vllm.engine import reading_of
from mismatch_ext.adapters.vllm.routing import records_routing
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from mismatch_ext.patching import active_patches, digest_of
from mismatch_ext.versions import on_cpu_build
from mismatch_ext.weights import BitSums, Piece, sums_of


class RolloutExtension(vLLMColocateWorkerExtension):
    """verl's extension of vLLM's worker, which also says what the worker runs with."""

    # vLLM adds this class to the bases of its worker.
    model_runner: Any

    def mismatch_report(self, features: list[str], acts: bool) -> dict[str, Any]:
        """Return what this worker really uses; the driver says which features its block has, and whether it acts."""
        config = self.model_runner.vllm_config
        if acts:
            compat.check(("vllm", "verl"), features, {"verl", "vllm", *(["cpu"] if on_cpu_build() else [])})
        return {
            "records_routing": records_routing(config),
            "patch_digest": digest_of(active_patches()),
            "reading": asdict(reading_of(self.model_runner, config)),
        }

    def mismatch_sums(self, shapes: dict[str, list[int]]) -> dict[str, BitSums]:
        """Return the sums of the bits of tensors that this worker holds in the trainer's layout, whole or a range of rows."""
        model = self.model_runner.model
        held, found = dict(model.named_parameters()), {}
        for name, wanted in shapes.items():
            if name not in held or held[name].dtype.itemsize < 2:  # quantized layers hold no bits of the trainer's
                continue
            values, shape, start = held[name].detach(), tuple(wanted), 0
            vocabulary = getattr(model.get_submodule(name.rpartition(".")[0]), "shard_indices", None)
            if vocabulary is not None:  # this rank's rows, and padding behind them
                start = int(vocabulary.org_vocab_start_index)
                values = values[: max(0, min(int(vocabulary.num_org_elements), shape[0] - start))]
            if values.shape[1:] == shape[1:] and (vocabulary is not None or values.shape == shape):
                piece = Piece(values=values.reshape(-1), start=start * values[:1].numel(), shape=shape)
                found[name] = sums_of(piece, values.dtype)
        return found
