"""Reentrant checkpoints have no hook on what they run again: what the function reads elsewhere may be of a later pass by then."""

import torch
from torch.utils.checkpoint import checkpoint

PEER = "torch"
REPORTED = "not reported"
WORKAROUND = "patch `torch/reentrant_checkpoint` binds the function to its forward pass (patches/torch/checkpoint.py)"
EXPECTED = 2.0
ROUTES = {"pass": 2.0}


def layer(x: torch.Tensor) -> torch.Tensor:
    return x * ROUTES["pass"]


def seen() -> float:
    """Return the gradient of 2x, where the next micro-batch's forward pass, with 3, comes before the backward pass."""
    x, ROUTES["pass"] = torch.ones(1, requires_grad=True), 2.0
    y = checkpoint(layer, x, use_reentrant=True)
    ROUTES["pass"] = 3.0
    y.backward()
    return float(x.grad)


def with_workaround() -> float:
    from contextlib import nullcontext
    from types import SimpleNamespace

    from mismatch_ext.patches.torch.checkpoint import checkpoints_bound

    bound = lambda function: lambda x, held=dict(ROUTES): (ROUTES.update(held), function(x))[1]  # noqa: E731
    with checkpoints_bound(SimpleNamespace(bound=bound, checkpointing=nullcontext)):
        return seen()


if __name__ == "__main__":
    from docs.upstream.shown import main

    main(globals())
