"""Probes of an actor whose head is one of verl's fused kernels (`model.use_fused_kernels`): log-probabilities without logits."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from mismatch_ext.adapters.transformers.scoring import Autocast, evaluating
from torch import Tensor, nn
from transformers import PreTrainedModel

from mismatch_ext.errors import ConfigError


def score_fused(model: nn.Module, token_ids: Tensor, autocast: Autocast = nullcontext) -> Tensor:
    """Score fixed token sequences by the fused head itself, which the actor trains with, at temperature 1.

    Args:
        model: The actor's model.
        token_ids: Tokens `[N, T]`, int64, on the model's device.
        autocast: Returns the trainer's autocast context.

    Returns:
        Log-probabilities `[N, T-1]`, float64, on the CPU.
    """
    with torch.no_grad(), evaluating(model), autocast():
        output = model(input_ids=token_ids, use_cache=False, return_dict=True, temperature=1.0)
    # The last place is scored against the first token.
    return checked(output.log_probs)[:, :-1].double().cpu()


def checked(logprobs: Tensor) -> Tensor:
    """Return a fused head's log-probabilities.

    Raises:
        ConfigError: They are rounded to half precision.
    """
    if logprobs.dtype not in (torch.float32, torch.float64):
        name = str(logprobs.dtype).removeprefix("torch.")
        raise ConfigError(
            f"actor_rollout_ref.model.fused_kernel_options.impl_backend: the fused head returns log-probabilities in {name}; "
            "allowed: float32, in which the rollout has its own. Use impl_backend='torch', or use_fused_kernels=False."
        )
    return logprobs


class WithLogits(nn.Module):
    """A model with a fused head, whose output has logits: those of its output layer, on the same hidden states.

    The output layer runs inside the model's own pass, where its weights are gathered.

    Args:
        model: The actor's model.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._causal = next(
            module
            for module in model.modules()
            if isinstance(module, PreTrainedModel) and module.get_output_embeddings() is not None
        )

    def forward(self, **inputs: Any) -> SimpleNamespace:
        """Run the model, and return its logits `[N, T, V]`."""
        head, found = self._causal.get_output_embeddings(), []

        def look(module: nn.Module, args: Any, output: Any) -> None:
            found.append(head(output[0]))

        handle = self._causal.base_model.register_forward_hook(look)
        try:
            self.model(**inputs, return_dict=True)
        finally:
            handle.remove()
        return SimpleNamespace(logits=found[-1])
