"""Our loss scaler against torch's, on the same training step."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.harness import paired
from mismatch_ext.precision.scaler import LossScaler


def trained(scaler: Any, steps: int = 20, device: str = "cpu") -> list[torch.Tensor]:
    """Train a small network in float16 autocast and return its parameters."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = torch.randn(32, 64).to(device), torch.randn(32, 8).to(device)
    for _ in range(steps):
        with torch.autocast(device, dtype=torch.float16):
            loss = torch.nn.functional.mse_loss(model(x).float(), y)
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return [p.detach() for p in model.parameters()]


def run() -> list[dict[str, Any]]:
    """Return the rows of this benchmark."""

    def ours() -> list[torch.Tensor]:
        return trained(LossScaler("cpu", init_scale=2.0**10, growth_interval=2000))

    def theirs() -> list[torch.Tensor]:
        return trained(torch.amp.GradScaler("cpu", init_scale=2.0**10))

    assert all(torch.equal(a, b) for a, b in zip(ours(), theirs(), strict=True))
    return [
        paired(
            "20 FP16 training steps with LossScaler vs torch.amp.GradScaler",
            ours,
            theirs,
            equal="all parameters after 20 steps, bit for bit",
        )
    ]
