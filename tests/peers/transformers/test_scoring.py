"""Probes of a weight update are scored in one pass, since each pass over a sharded model gathers all of its weights."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from mismatch_ext.adapters.transformers.scoring import score_tokens
from torch import Tensor, nn

from mismatch_ext.weights import draw_probes

QWEN3 = 151_936


class Counting(nn.Module):
    """A model of Qwen3's vocabulary that notes how many rows each pass has."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=QWEN3, get_text_config=lambda: self.config)
        self.passes: list[int] = []

    def forward(self, input_ids: Tensor, use_cache: bool) -> SimpleNamespace:
        self.passes.append(len(input_ids))
        return SimpleNamespace(logits=torch.zeros(*input_ids.shape, QWEN3, dtype=torch.bfloat16))


def test_probes_over_a_large_vocabulary_take_one_pass() -> None:
    model, probes = Counting(), draw_probes(torch.arange(QWEN3))
    assert score_tokens(model, probes).shape == (len(probes), probes.shape[1] - 1)
    assert model.passes == [len(probes)]
