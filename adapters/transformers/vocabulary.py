"""Token ids that the model can sample but its tokenizer does not have."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from mismatch_ext.adapters.transformers.scoring import Autocast, probe_logits
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class VocabularySurplus:
    """How much larger the model's vocabulary is than its tokenizer's, and what that costs.

    Args:
        model_size: Rows of the output layer.
        tokenizer_size: Tokens that the tokenizer knows.
        mass_mean: Mean over probe positions of the probability to sample an id that the tokenizer does not have.
        mass_max: Largest such probability at a probe position.
    """

    model_size: int
    tokenizer_size: int
    mass_mean: float
    mass_max: float

    def __str__(self) -> str:
        surplus = self.model_size - self.tokenizer_size
        in_a_response = 1 - (1 - min(self.mass_mean, 1.0)) ** 1000
        return (
            f"the model's vocabulary has {self.model_size} ids, its tokenizer {self.tokenizer_size}: {surplus} ids can "
            f"be sampled but not decoded. On probe tokens the policy gives them probability {self.mass_mean:.2e} on "
            f"average and {self.mass_max:.2e} at most; a response of 1000 tokens then contains one with probability "
            f"{in_a_response:.2e}. If that matters, resize the model's embeddings to the "
            f"tokenizer or mask these ids in both engine and trainer."
        )


def vocabulary_surplus(
    model: nn.Module, tokenizer_size: int, token_ids: Tensor, autocast: Autocast = nullcontext
) -> VocabularySurplus | None:
    """Measure the probability of ids beyond the tokenizer's vocabulary, or return None when there are none.

    Args:
        model: A causal language model.
        tokenizer_size: `len(tokenizer)`.
        token_ids: Probe tokens `[N, T]`, int64, on the model's device.
        autocast: Returns the trainer's autocast context.
    """
    return surplus_of(probe_logits(model, token_ids, autocast), tokenizer_size)


def surplus_of(logits: Tensor, tokenizer_size: int) -> VocabularySurplus | None:
    """Return the surplus that logits show, or None when there is none.

    Args:
        logits: Logits of probe tokens `[N, T, V]`.
        tokenizer_size: `len(tokenizer)`.
    """
    if logits.shape[-1] <= tokenizer_size:
        return None
    mass = torch.softmax(logits.float(), dim=-1)[..., tokenizer_size:].sum(-1)
    return VocabularySurplus(
        model_size=logits.shape[-1],
        tokenizer_size=tokenizer_size,
        mass_mean=float(mass.mean()),
        mass_max=float(mass.max()),
    )


def plain_vocabulary(tokenizer: PreTrainedTokenizerBase, device: torch.device | str = "cpu") -> Tensor:
    """Return the token ids `[V]`, int64, that stand for text and have no special meaning.

    Args:
        tokenizer: The model's tokenizer.
        device: Device of the returned ids.
    """
    special = set(tokenizer.added_tokens_decoder) | set(tokenizer.all_special_ids)
    return torch.tensor(sorted(set(range(len(tokenizer))) - special), device=device)
