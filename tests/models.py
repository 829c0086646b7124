"""Tiny randomly initialized models for tests of plumbing, of the same architectures as the examples."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from examples.arithmetic.recipe import RECIPES, build_model
from examples.arithmetic.tokenizer import make_tokenizer


def tiny_model(kind: str, directory: Path, seed: int = 0, *, extra_vocabulary: int = 0, tied: bool = True) -> Path:
    """Save a two-layer checkpoint of hidden size 64, with its tokenizer.

    The initial weights are drawn wider than usual (standard deviation 0.2): the policy is then far enough
    from uniform for stale or garbled weights to show in its log-probabilities. The dense model's output head is tied to its
    embeddings, as in most models of up to 8 billion parameters; the other one's is not.

    Args:
        kind: "dense" (Qwen3) or "moe" (Qwen3-MoE, 16 experts, 4 per token).
        directory: folder to write; created when missing.
        seed: seed of the weights.
        extra_vocabulary: rows of the model's vocabulary beyond the tokenizer's.
        tied: whether a dense model's output head is tied to its embeddings.

    Returns:
        `directory`.
    """
    recipe = replace(
        RECIPES[kind],
        hidden_size=64,
        layers=2,
        heads=2,
        key_value_heads=1,
        intermediate_size=128,
        expert_intermediate_size=32,
        initializer_range=0.2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build_model(recipe, extra_vocabulary=extra_vocabulary)
    if kind == "dense" and tied:
        model.config.tie_word_embeddings = True
        model.tie_weights()
    model.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return directory
