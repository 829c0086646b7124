"""Gradient checkpointing: a layer that is recomputed in a backward pass must find the session of its own forward pass.

A checkpointed layer is handed as a function to a checkpoint function, which the model keeps. During replay it is handed a
function that holds the session instead. So the session lives as long as the graph does: there is no queue, and backward passes
may come in any order, inside or after the context. This serves both modes of torch.utils.checkpoint; its `context_fn` would
serve non-reentrant checkpoints only. A checkpoint function that is not found is refused if a router runs in it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from types import CellType, FrameType
from typing import Any

import torch
from torch import nn
from torch.autograd.function import FunctionCtx


def checkpoint_functions(decoder: nn.Module) -> Iterator[tuple[Any, str]]:
    """Yield the objects that keep a checkpoint function of the decoder's layers, and the names they keep it by."""
    yielded = set()
    for module in decoder.modules():
        # verl's activation offload keeps its function on an object that a layer's new forward closes over.
        cells = getattr(vars(module).get("forward"), "__closure__", None) or ()
        for owner in (module, *_contents(cells)):
            # transformers' name, and that of the wrappers by which accelerate checkpoints FSDP1 and FSDP2.
            for name in ("_gradient_checkpointing_func", "checkpoint_fn"):
                if name in getattr(owner, "__dict__", ()) and id(owner) not in yielded:
                    yielded.add(id(owner))
                    yield owner, name


def _contents(cells: Iterable[CellType]) -> Iterator[Any]:
    """Yield what a function closes over, apart from variables that have no value."""
    for cell in cells:
        with suppress(ValueError):
            yield cell.cell_contents


def in_backward() -> bool:
    """Tell whether this thread is in a backward pass, in which every forward is a recomputation."""
    return torch._C._current_graph_task_id() != -1  # torch.utils.checkpoint asks in this way


def runs_unbound(gradients: bool) -> bool:
    """Tell whether the running code is in a checkpoint that knows no session; ask only outside those that know theirs.

    Args:
        gradients: Whether gradients were on around it.
    """
    if gradients and not torch.is_grad_enabled() and _in_function():
        return True  # a reentrant checkpoint, which runs without gradients
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and getattr(hooks[0], "__qualname__", "").startswith("_checkpoint_hook")


def _in_function() -> bool:
    """Tell whether the running code is in the forward of an autograd function, as all of a reentrant checkpoint is."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_argcount and isinstance(frame.f_locals.get(code.co_varnames[0]), FunctionCtx):
            return True
        frame = frame.f_back
    return False
