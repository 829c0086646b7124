"""SGLang plugin: allocates the host buffer of recorded experts without pinned memory, which needs an accelerator."""

from __future__ import annotations

from typing import Any
from unittest import mock

TARGET = "sglang.srt.state_capturer.base.BaseHostCache.__init__"


def register() -> None:
    """Hook the buffer's constructor; SGLang calls this in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(TARGET, unpinned, HookType.AROUND)


def unpinned(construct: Any, *args: Any, **kwargs: Any) -> Any:
    """Run SGLang's constructor with its allocator replaced: `torch.zeros` in 0.5.18, a table of allocators in 0.5.23."""
    import sglang.srt.state_capturer.base as base
    import torch

    zeros = torch.zeros

    def plain_zeros(*shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return zeros(*shape, **options)

    def plain(dims: Any, *, dtype: torch.dtype, device: str, **options: Any) -> torch.Tensor:
        return torch.empty(dims, dtype=dtype, device=device)

    with (
        mock.patch.object(torch, "zeros", plain_zeros),
        mock.patch.dict(getattr(base, "ALLOC_MEMORY_FUNCS", {}), {"cpu": plain}),
    ):
        return construct(*args, **kwargs)
