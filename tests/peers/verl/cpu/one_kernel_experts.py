"""Experts of a vLLM on a CPU that are no kernel class yet, 0.24's: one call chooses and computes, and no router is asked.

What is recorded of a routing is what routers are asked for: left alone, this vLLM returns zeros and no error.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from tests.peers.verl.cpu.after_import import AfterImport


def take_back_what_is_known() -> None:
    """Let R3 start with a vLLM whose routes are known to be wrong on a CPU: here they are mended, or wrong on purpose."""

    def change(versions: Any) -> None:
        versions.KNOWN_WRONG = tuple(
            wrong for wrong in versions.KNOWN_WRONG if (wrong.peer, wrong.feature) != ("vllm", "routing.R3")
        )

    AfterImport("mismatch_ext.versions", change)


def compute_with_torch() -> None:
    """Take each expert through torch, on a view of the weights that are loaded into, and never repack them.

    vLLM chooses torch itself where a CPU's kernel does not fit. There it also builds the activation's module in every call, which
    needs a setting that only holds while the engine starts.
    """
    import vllm.model_executor.layers.fused_moe.cpu_fused_moe as kernels

    kernels.CPUFusedMOE.check_grouped_gemm = lambda self, layer: (False, "none")
    kernels._CPU_MOE_ACT_FN[kernels.MoEActivation.SILU] = _silu_and_mul


def tell_the_router() -> None:
    """Hand the chosen experts to the capturer that vLLM gave the layer's router, which a router that is asked does itself."""
    import vllm.model_executor.layers.fused_moe.cpu_fused_moe as kernels
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    apply, select = MoERunner._apply_quant_method, kernels.select_experts
    routers: list[Any] = []

    @functools.wraps(apply)
    def apply_for_router(self: Any, *args: Any, **kwargs: Any) -> Any:
        routers.append(self.router)
        try:
            return apply(self, *args, **kwargs)
        finally:
            routers.pop()

    @functools.wraps(select)
    def told_select(*args: Any, **kwargs: Any) -> Any:
        weights, ids = select(*args, **kwargs)
        if (capture := routers[-1].capture_fn) is not None:
            capture(ids)
        return weights, ids

    MoERunner._apply_quant_method = apply_for_router
    kernels.select_experts = told_select


def _silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up
