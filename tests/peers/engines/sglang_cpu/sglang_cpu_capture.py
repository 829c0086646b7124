"""SGLang plugin: does without pinned memory, which needs an accelerator, where SGLang pins without asking for the device.

That is the host buffer of recorded experts, and in 0.5.12 three lists of indices for the log-probabilities of a prompt. There
it also copies recorded experts, as moving them from a GPU does.
"""

from __future__ import annotations

from importlib import metadata
from typing import Any
from unittest import mock

BUFFER = "sglang.srt.state_capturer.base.BaseHostCache.__init__"
PROCESSOR = "sglang.srt.layers.logits_processor.LogitsProcessor"
# Without these, 0.5.12 ends its scheduler at the first request for a prompt's log-probabilities: "pin_memory=True requires a
# CUDA or other accelerator backend". A GPU is such a backend; 0.5.18 and later pin only where there is one.
INDICES = (f"{PROCESSOR}._get_pruned_states", f"{PROCESSOR}._expand_metadata_for_logprobs")

# Without this, 0.5.12 with overlapped batches returns the experts of a later batch: it hands on a view of the buffer that every
# batch writes into, moved to the CPU in the forward's stream, and reads it after the next forward was launched. From a GPU the
# move is a copy, on a CPU it is none; 0.5.18 and later are exact without.
RECORDED = "sglang.srt.state_capturer.base.TopkCaptureOutput.copy_to_cpu"


def register() -> None:
    """Hook what cannot run on a CPU; SGLang calls this in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(BUFFER, unpinned, HookType.AROUND)
    if metadata.version("sglang").startswith("0.5.12"):
        for target in INDICES:
            HookRegistry.register(target, unpinned, HookType.AROUND)
        HookRegistry.register(RECORDED, copied, HookType.AROUND)


def unpinned(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Run SGLang's function with its allocators replaced: `torch.zeros` and `torch.tensor`, in 0.5.23 a table of allocators."""
    import sglang.srt.state_capturer.base as base
    import torch

    zeros, tensor = torch.zeros, torch.tensor

    def plain_zeros(*shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return zeros(*shape, **options)

    def plain_tensor(data: Any, *, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return tensor(data, **options)

    def plain(dims: Any, *, dtype: torch.dtype, device: str, **options: Any) -> torch.Tensor:
        return torch.empty(dims, dtype=dtype, device=device)

    with (
        mock.patch.object(torch, "zeros", plain_zeros),
        mock.patch.object(torch, "tensor", plain_tensor),
        mock.patch.dict(getattr(base, "ALLOC_MEMORY_FUNCS", {}), {"cpu": plain}),
    ):
        return function(*args, **kwargs)


def copied(move: Any, output: Any) -> None:
    """Let SGLang move what it recorded, as a copy."""
    output.topk = output.topk.clone()
    move(output)
