"""What this package relies on in torch; transformers' routers are not listed, but found in each model."""

from __future__ import annotations

from mismatch_ext.seams import Seam, exists

_SCALER = "torch.amp.grad_scaler"

SEAMS = (
    Seam(
        name="torch/loss_scaler",
        features=("precision",),
        what="a loss scaler whose ranks agree on an overflow before any of them steps",
        claims=(
            exists(f"{_SCALER}:GradScaler._found_inf_per_device", "optimizer"),
            exists(f"{_SCALER}:GradScaler.unscale_", "optimizer"),
            exists(f"{_SCALER}:OptState"),
        ),
        checked="a scaler that is off, and overflows that do not end, are errors",
        upstream="https://github.com/pytorch/pytorch/blob/v2.13.0/torch/amp/grad_scaler.py",
    ),
)
