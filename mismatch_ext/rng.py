"""Random numbers of a pass that a plain run does not make."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch


def forked_rng(device: torch.device) -> AbstractContextManager[None]:
    """Return a context after which random numbers go on as if none had been drawn in it, on the CPU and on one device."""
    # Without devices, torch copies the state of every visible GPU, and warns. It forks no generator of mps.
    devices = [] if device.type in ("cpu", "mps") else [device]
    return torch.random.fork_rng(devices, device_type=device.type if devices else "cuda")
