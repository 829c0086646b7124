"""Random numbers of a pass that a plain run does not make."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch


def forked_rng(device: torch.device) -> AbstractContextManager[None]:
    """Return a context after which random numbers go on as if none had been drawn in it.

    Without devices, `torch.random.fork_rng` copies the state of every GPU that is visible, and warns.

    Args:
        device: The only device, besides the CPU, on which numbers are drawn.
    """
    devices = [] if device.type in ("cpu", "mps") else [device]  # torch forks no generator of mps
    return torch.random.fork_rng(devices, device_type=device.type if devices else "cuda")
