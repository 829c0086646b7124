"""Gradient checkpointing: a layer that is recomputed in a backward pass must find the session of its own forward pass.

torch.utils.checkpoint, in both modes, keeps the function that it will run again. During replay that function is wrapped as the
forward runs (patches/torch/checkpoint.py), and the wrapper holds the session. So the session lives as long as the graph does:
there is no queue, and backward passes may come in any order, inside or after the context. It does not matter when or by whom
checkpointing was enabled, because torch's own function is wrapped. A checkpoint of another make is refused if a router runs in
it.
"""

from __future__ import annotations

import torch


def in_backward() -> bool:
    """Tell whether this thread is in a backward pass, in which every forward is a recomputation."""
    return torch._C._current_graph_task_id() != -1  # torch.utils.checkpoint asks in this way


def runs_unbound(gradients: bool) -> bool:
    """Tell whether the running code is in a checkpoint that knows no session; ask only outside those that know theirs.

    Args:
        gradients: Whether gradients were on when the decoder's forward began.
    """
    if gradients and not torch.is_grad_enabled():
        return True  # reentrant checkpoints run without gradients
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and getattr(hooks[0], "__qualname__", "").startswith("_checkpoint_hook")
