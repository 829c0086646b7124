"""Repack the experts of a CPU engine after a weight update."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any
from unittest import mock

from mismatch_ext.errors import PatchDriftError
from mismatch_ext.patching import Patch, described
from mismatch_ext.versions import in_range, installed


def _make(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def setup_kernel(self: Any, layer: Any, w13: Any, w2: Any) -> None:
        from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

        is_weight_update = self.moe_kernel is not None
        if not (is_weight_update and self.unquantized_backend == UnquantizedMoeBackend.CPU):
            return original(self, layer, w13, w2)
        experts, name = self.moe_kernel.fused_experts, "process_weights_after_loading"
        with mock.patch.object(experts, name, wraps=getattr(experts, name)) as packing:
            original(self, layer, w13, w2)
        if not packing.called:  # packed twice they would be garbled as well
            experts.process_weights_after_loading(layer)

    return setup_kernel


CPU_MOE_REPACK = Patch(
    name="vllm/cpu_moe_repack",
    peer="vllm",
    supports=">=0.29.0,<=0.32.0",
    target=(
        "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod._setup_kernel"
    ),
    make=_make,
    observed="monitor.weight_sync scores probe tokens after each weight update, which tells garbled experts",
    upstream="https://github.com/vllm-project/vllm/blob/v0.30.0/vllm/model_executor/layers/fused_moe/unquantized_fused_moe_method.py",
    reason=(
        "the CPU prepack of the experts runs on the first load only, so after any weight update raw weights lie in "
        "the packed layout and every expert computes with garbled weights; no error is raised."
    ),
    not_covered="Quantized experts, and engines in another process that this package is no plugin of.",
    remove_when="vLLM repacks CPU experts on weight updates too.",
)


@cache
def cpu_moe_repack() -> tuple[Patch, ...]:
    """Return the patch for a CPU engine of the installed vLLM.

    The tuple is empty before vLLM 0.29, which packs experts at every load. It is also empty, with a warning, if vLLM's function
    is gone, because dense models never need it and the probes after each weight update show garbled experts.
    """
    if in_range(installed("vllm") or "0", "<0.29"):
        return ()
    try:
        described(CPU_MOE_REPACK)
    except PatchDriftError as error:
        warnings.warn(
            f"{error} Should experts be garbled after a weight update, mismatch.monitor.weight_sync tells.",
            stacklevel=2,
        )
        return ()
    return (CPU_MOE_REPACK,)
