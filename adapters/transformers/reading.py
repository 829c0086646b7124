"""Read back from the live model, autocast context and loss scaler what a trainer really computes with."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from mismatch_ext.adapters.transformers.scoring import Autocast
from torch import nn

from mismatch_ext.precision.audit import TrainerReading


def read_trainer(model: nn.Module, autocast: Autocast, scaler: Any, device: torch.device) -> TrainerReading:
    """Read parameter dtypes, the dtype that a matrix product has under autocast, and the loss scaler's state.

    Args:
        model: The model being trained.
        autocast: Returns the trainer's autocast context, for example `accelerator.autocast`.
        scaler: The gradient scaler in use, or None.
        device: Where the forward pass runs.
    """
    counts: Counter[str] = Counter()
    for parameter in model.parameters():
        # Frozen parameters count too: a half-precision base under LoRA is merged in its own dtype, not as the trainer adds them.
        if parameter.is_floating_point():
            counts[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
    # Flags can lie, but a product of two float32 matrices has autocast's dtype only if autocast is really on.
    with autocast():
        ones = torch.ones(2, 2, dtype=torch.float32, device=device)
        product = (ones @ ones).dtype
    under_autocast = None
    if product != torch.float32:
        under_autocast = str(product).removeprefix("torch.")
    state = None
    if scaler is not None:
        state = {"class": type(scaler).__name__, "enabled": bool(scaler.is_enabled()), "scale": scaler.get_scale()}
    return TrainerReading(
        parameter_dtypes=dict(counts),
        autocast_dtype=under_autocast,
        scaler=state,
        reduce_dtype=None,
        device=device.type,
    )
