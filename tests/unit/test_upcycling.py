"""The mixture of experts that is made from a dense model: without noise it is that model, and with noise experts differ."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from examples.smollm2 import Text, mixture_of

TEXT = Text(tokens=torch.randint(3, 96, (1, 40), generator=torch.Generator().manual_seed(1)), prompt_length=8)


@pytest.fixture(scope="module")
def dense() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, tie_word_embeddings=True, initializer_range=0.2,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval()


def test_without_noise_the_mixture_is_the_dense_model(dense: LlamaForCausalLM) -> None:
    mixture = mixture_of(dense, experts=4, noise=0.0)
    with torch.no_grad():
        logits, expected = mixture(TEXT.tokens).logits.double(), dense.double()(TEXT.tokens).logits
        rounding = (dense.float()(TEXT.tokens).logits.double() - expected).abs().max()
    assert (logits - expected).abs().max() < 8 * rounding
    assert mixture.get_output_embeddings().weight is mixture.get_input_embeddings().weight
