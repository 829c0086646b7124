"""Tiny randomly initialized models for tests of plumbing, of the same architectures as the examples."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AttentionInterface,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma2PreTrainedModel,
    GenerationConfig,
    MixtralConfig,
    MixtralForCausalLM,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from examples.arithmetic.recipe import RECIPES, build_model
from examples.arithmetic.tokenizer import EOS_ID, PAD_ID, VOCABULARY, make_tokenizer


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


def take_sdpa_for_gemma2() -> None:
    """Let transformers take `sdpa` for Gemma-2 in this process and drop its soft cap, as it did up to 5.19; newer ones refuse."""
    Gemma2PreTrainedModel._supports_sdpa = True

    def without_cap(*args: Any, softcap: float | None = None, **kwargs: Any) -> Any:
        return sdpa_attention_forward(*args, **kwargs)

    AttentionInterface.register("sdpa", without_cap)


def tiny_gemma2(directory: Path, *, cap: float | None = 5.0) -> Path:
    """Save a two-layer Gemma-2 whose attention scores reach far beyond the soft cap, with its tokenizer.

    This process then takes `sdpa` for it, which drops the cap.

    Args:
        directory: Folder to write; created when missing.
        cap: Soft cap of attention's scores; None for none.
    """
    take_sdpa_for_gemma2()
    config = Gemma2Config(
        vocab_size=len(VOCABULARY),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        sliding_window=32,
        query_pre_attn_scalar=32,
        attn_logit_softcapping=cap,
        final_logit_softcapping=3.0,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Gemma2ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=EOS_ID, pad_token_id=PAD_ID)
    model.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return directory


def tiny_mixtral(directory: Path) -> Path:
    """Save a two-layer Mixtral, whose checkpoint names and cuts its experts in another way than transformers does.

    Args:
        directory: Folder to write; created when missing.
    """
    config = MixtralConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=256,
        num_local_experts=4,
        num_experts_per_tok=2,
        initializer_range=0.2,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MixtralForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=EOS_ID, pad_token_id=PAD_ID)
    model.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return directory
