"""Log-probabilities of verl's FSDP engine in float32, even where verl takes them in the dtype of the logits.

With flash-attention's cross-entropy verl's log-probabilities are float32. Without it they can be rounded to the logits' half
precision, in bfloat16 to steps of 1/32 from -4 to -8, while the rollout engine's are float32: a gap from this rounding only.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from mismatch_ext.adapters.verl.worker.fused import checked
from verl.utils import torch_functional
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from mismatch_ext.config import MismatchConfig


def rounds_logprobs() -> bool:
    """Tell whether verl takes log-probabilities in the logits' dtype, because flash-attention's cross-entropy is not used."""
    available = bool(torch_functional.FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE)
    return not available or os.environ.get("VERL_DISABLE_FLASH_ATTN_CE", "0") == "1"


class LogprobsMixin(FSDPEngineWithLMHead):
    """Widens the logits before verl takes log-probabilities of them, under `mismatch.precision`."""

    block: MismatchConfig | None

    def prepare_model_outputs(self, output: Any, *args: Any, **kwargs: Any) -> Any:
        """Prepare a pass's outputs as the parent does, from logits in float32 where verl would round.

        Raises:
            ConfigError: A fused head has rounded the log-probabilities.
        """
        asked = self.block is not None and self.block.precision is not None
        logits = getattr(output, "logits", None)
        if asked and isinstance(logits, torch.Tensor) and logits.dtype != torch.float32 and rounds_logprobs():
            output.logits = logits.float()
        if asked and isinstance(logprobs := getattr(output, "log_probs", None), torch.Tensor):
            checked(logprobs)  # of a fused head, which returns no logits
        return super().prepare_model_outputs(output, *args, **kwargs)
