"""The output head of TRL's trainers: TRL multiplies hidden states by its weight in a fused head of its own."""

from __future__ import annotations

from typing import Any

import torch
from mismatch_ext.adapters.transformers.scoring import Autocast, evaluating
from mismatch_ext.patches.trl.fused_head import scoring_with
from torch import Tensor, nn


def read_fused_head(model: nn.Module, autocast: Autocast) -> str | None:
    """Return the dtype that TRL's fused head has its products in; None if the model's pass does not reach it.

    Args:
        model: The policy, unwrapped, in which TRL has put its head.
        autocast: Returns the trainer's autocast context.

    Raises:
        PatchError: TRL's head is not what it was.
    """
    products: list[str] = []

    def look(hidden: Tensor, weight: Tensor, *_: Any, **__: Any) -> None:
        product = hidden[:1] @ weight[:1].T  # under the autocast that the head itself has
        products.append(str(product.dtype).removeprefix("torch."))

    token = torch.zeros(1, 2, dtype=torch.int64, device=next(model.parameters()).device)
    # Autocast comes last, because the patch first tries TRL's head in float32.
    with torch.no_grad(), evaluating(model), scoring_with(look, entropies=True), autocast():
        model(input_ids=token, labels=token, fused_lm_head=True)
    return products[0] if products else None
