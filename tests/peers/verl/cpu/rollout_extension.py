"""Let verl send weights into a vLLM engine on a CPU.

Nothing here is a worker extension: the repair is made when verl loads the CPU platform in vLLM's worker processes, so
that it holds under whatever extension class the run names.
"""

from __future__ import annotations

import functools
from typing import Any

import torch


@functools.cache
def keep_weights_reloadable() -> None:
    """Keep linear and expert weights as the checkpoint has them, in the place of vLLM's packed CPU layouts.

    verl loads tensor by tensor into the running engine. Packed linear layers have lost their weight loader then, which
    ends in an AttributeError inside the engine; packed experts take the raw weights without a word and compute with
    garbage. Linear layers go through torch instead; so do older vLLM's experts, and today's are packed anew in every call.
    """
    import vllm.model_executor.layers.fused_moe.experts.cpu_moe as cpu_moe
    import vllm.model_executor.layers.utils as layer_utils

    def plain_linear(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    layer_utils.dispatch_cpu_unquantized_gemm = plain_linear
    if hasattr(cpu_moe, "CPUUnquantizedExperts"):
        _pack_experts_anew(cpu_moe)
    else:
        from tests.peers.verl.cpu import one_kernel_experts

        one_kernel_experts.compute_with_torch()
        one_kernel_experts.tell_the_router()


def _pack_experts_anew(cpu_moe: Any) -> None:
    experts = cpu_moe.CPUUnquantizedExperts
    original = experts.apply

    def leave_raw(self: Any, layer: torch.nn.Module) -> None:
        alignment = self._intermediate_alignment()
        if self.moe_config.intermediate_size_per_partition % alignment:
            raise ValueError(
                f"moe_intermediate_size is {self.moe_config.intermediate_size_per_partition}; "
                f"without padding the CPU kernel takes multiples of {alignment} only"
            )

    @functools.wraps(original)
    def apply(self: Any, output: Any, hidden_states: Any, w1: Any, w2: Any, *args: Any, **kwargs: Any) -> Any:
        packed = (cpu_moe.cpu_prepack_moe_weight(weight, self.isa) for weight in (w1, w2))
        return original(self, output, hidden_states, *packed, *args, **kwargs)

    experts.process_weights_after_loading = leave_raw
    experts.apply = apply
