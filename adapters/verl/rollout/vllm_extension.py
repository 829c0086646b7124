"""What runs inside the workers of verl's vLLM server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from mismatch_ext.adapters import compat
from mismatch_ext.adapters.vllm.engine import reading_of
from mismatch_ext.adapters.vllm.routing import records_routing
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from mismatch_ext.errors import EngineError
from mismatch_ext.patching import active_patches, digest_of
from mismatch_ext.versions import on_cpu_build
from mismatch_ext.weights import BitSums, Piece, sums_of


class RolloutExtension(vLLMColocateWorkerExtension):
    """verl's extension of vLLM's worker, which also says what the worker runs with."""

    # vLLM adds this class to the bases of its worker.
    model_runner: Any
    # Buffers of an update, kept while vLLM's own cannot be copied into.
    _buffers_aside: list[tuple[str, Any]]
    mismatch_acts = False
    """Whether the driver's block acts here; the driver says so before it sends the first weights."""

    def mismatch_report(self, features: list[str], acts: bool) -> dict[str, Any]:
        """Return what this worker really uses; the driver says which features its block has, and whether it acts."""
        config = self.model_runner.vllm_config
        self.mismatch_acts = acts
        if acts:
            compat.check(("vllm", "verl"), features, {"verl", "vllm", *(["cpu"] if on_cpu_build() else [])})
        return {
            "records_routing": records_routing(config),
            "patch_digest": digest_of(active_patches()),
            "reading": asdict(reading_of(self.model_runner, config)),
        }

    @property
    def _reloads(self) -> bool:
        """Whether vLLM quantizes tensors while it loads them, and the block acts."""
        return (
            self.mismatch_acts
            and type(self.model_runner.vllm_config.quant_config).__name__ == "OnlineQuantizationConfig"
        )

    def update_weights_from_ipc(
        self, peft_config: Any = None, base_sync_done: bool = False, *args: Any, **kwargs: Any
    ) -> None:
        """Load new weights; what vLLM quantizes is loaded layer by layer, as verl would put it into quantized tensors."""
        if self._reloads and not (peft_config and base_sync_done):  # unless only an adapter is sent
            from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

            self._buffers_aside = []
            initialize_layerwise_reload(self.model_runner.model)
        super().update_weights_from_ipc(peft_config, base_sync_done, *args, **kwargs)

    def _update_weights(self, weights: list[tuple[str, Any]], *args: Any, **kwargs: Any) -> None:
        if self._reloads:
            # vLLM keeps tensors until their layer is complete, and verl's buffer is used again by then.
            weights = [(name, tensor.clone()) for name, tensor in weights]
        super()._update_weights(weights, *args, **kwargs)

    def _apply_buffer_updates_all_models(self, buffer_updates: Any, main_named_buffers: Any) -> Any:
        if not self._reloads:
            return super()._apply_buffer_updates_all_models(buffer_updates, main_named_buffers)
        # While layers are reloaded the model's buffers are on `meta`, where a copy is lost without a word.
        self._buffers_aside += buffer_updates
        return len(buffer_updates)

    def _iter_all_models_with_config(self) -> Iterator[Any]:
        """Yield the models that verl processes after the last tensor: none if vLLM has processed the model layer by layer."""
        if not self._reloads:
            yield from super()._iter_all_models_with_config()
            return
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        model = self.model_runner.model
        finalize_layerwise_reload(model, self.model_runner.vllm_config.model_config)
        buffers = dict(model.named_buffers())
        if lost := sorted({name for name, _ in self._buffers_aside} - buffers.keys()):
            raise EngineError(
                f"vLLM reloaded the model layer by layer, and has no buffer {lost[0]!r} any more ({len(lost)} in all), which the "
                "trainer has sent; remove mismatch.precision.engine_weights and the engine's quantization."
            )
        super()._apply_buffer_updates_all_models(self._buffers_aside, buffers)
        self._buffers_aside = []

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
