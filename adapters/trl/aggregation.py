"""What each token's loss weighs in TRL's loss, by loss type.

`behavior.py` compares these weights with the slopes of TRL's loss when a trainer is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

PER_STEP = ("cispo", "dapo", "vespo")
"""Loss types that divide by the tokens of a whole optimizer step."""


def mask_of_loss(inputs: Mapping[str, Any]) -> Tensor:
    """Return 1 where a token is trained on, 0 elsewhere `[B, T]`."""
    mask: Tensor = inputs["completion_mask"] * inputs.get("tool_mask", 1)
    return mask


def token_weights(trainer: Any, inputs: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return d loss / d per-token loss of a micro-batch `[B, T]`: positive where tokens are trained on, 0 elsewhere.

    Args:
        trainer: GRPO's, of one of the loss types that `behavior.LOSS_TYPES` lists.
        inputs: The micro-batch.
        dtype: Of the weights.

    Raises:
        KeyError: The loss type is another.
    """
    mask, training = mask_of_loss(inputs).to(dtype), trainer.model.training
    passes = trainer.current_gradient_accumulation_steps if training else 1.0
    of_loss = torch.ones((), dtype=dtype, device=mask.device)
    if trainer.loss_type in PER_STEP:
        # TRL counts the tokens of a generation batch, which may last for several steps.
        tokens: Tensor = inputs["num_items_in_batch"].clamp(min=1.0) / trainer.accelerator.num_processes
        if training:
            tokens = tokens * passes / trainer.args.steps_per_generation
        return of_loss / tokens * mask
    rows = len(mask)
    of_row = mask.sum(1, keepdim=True).clamp(min=1.0)
    # Divided in the order in which the gradient of TRL's sum comes back, so that the weights are its own to the bit.
    of_loss = of_loss / passes
    if trainer.loss_type == "bnpo":
        return of_loss / mask.sum().clamp(min=1.0) * mask
    if trainer.loss_type == "dr_grpo":
        most_tokens = rows * int(trainer.max_completion_length)
        return of_loss / most_tokens * mask
    of_loss = of_loss / rows
    return {"grpo": of_loss / of_row, "sapo": of_loss / of_row, "luspo": of_loss}[trainer.loss_type] * mask
