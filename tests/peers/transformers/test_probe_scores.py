"""Scores of probe tokens over a large vocabulary."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from mismatch_ext.adapters.transformers import scoring
from torch import Tensor, nn

from mismatch_ext.weights import draw_probes

QWEN3 = 151_936
HIDDEN = 2


class Wide(nn.Module):
    """A model with the vocabulary of Qwen3, which counts its passes."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.head = nn.Parameter(torch.randn(HIDDEN, QWEN3, generator=generator))
        self.config = SimpleNamespace(vocab_size=QWEN3)
        self.passes = 0

    def forward(self, input_ids: Tensor, use_cache: bool) -> SimpleNamespace:
        self.passes += 1
        hidden = torch.stack([input_ids % 7, input_ids % 5], dim=-1).float()
        return SimpleNamespace(logits=hidden @ self.head)


def test_probes_take_one_pass_over_a_large_vocabulary() -> None:
    """A pass over a sharded model gathers all of its weights."""
    model, probes = Wide(), draw_probes(torch.arange(QWEN3))
    found = scoring.score_tokens(model, probes)
    assert model.passes == 1
    with torch.no_grad():
        first = model(probes[:1], use_cache=False).logits[0].log_softmax(-1)
    assert torch.equal(found[0], first[:-1].gather(-1, probes[0, 1:, None])[:, 0].double())
