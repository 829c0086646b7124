"""The recipes of the example models, and the models they describe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import (
    GenerationConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from examples.arithmetic.task import FAMILIAR_DIGITS
from examples.arithmetic.tokenizer import EOS_ID, PAD_ID, VOCABULARY


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides a checkpoint, apart from package versions."""

    kind: str
    """"dense" (Qwen3) or "moe" (Qwen3-MoE)."""
    steps: int
    batch_size: int
    """Demonstrations per step; they are packed, so the number of rows varies."""
    row_length: int = 72
    """Tokens per packed row; at least the longest demonstration."""
    learning_rate: float
    """Peak of a linear warm-up and cosine decay."""
    warmup_steps: int = 50
    final_learning_rate: float = 0.05
    """Last learning rate as a fraction of the peak."""
    beta1: float = 0.9
    beta2: float = 0.98
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    direct_fraction: float = 0.30
    """Fraction of demonstrations without working."""
    error: float = 0.04
    """Probability that a written step is wrong."""
    digits: tuple[int, int] = FAMILIAR_DIGITS
    hidden_size: int = 128
    layers: int = 4
    heads: int = 4
    key_value_heads: int = 2
    head_dim: int = 32
    """vLLM's CPU attention takes 32, 64, 128 and some others, but nothing below 32."""
    intermediate_size: int = 256
    initializer_range: float
    """Standard deviation of the initial weights; the dense model's is wider than usual, because its layers are narrow."""
    experts: int = 16
    experts_per_token: int = 4
    expert_intermediate_size: int = 64
    balance_loss: float = 0.01
    """Weight of the router's load-balancing loss."""
    seed: int = 0


RECIPES = {
    "dense": Recipe(kind="dense", steps=450, batch_size=24, learning_rate=5e-3, initializer_range=0.05),
    "moe": Recipe(kind="moe", steps=300, batch_size=64, learning_rate=2e-3, initializer_range=0.02),
}


def build_model(recipe: Recipe, *, extra_vocabulary: int = 0) -> PreTrainedModel:
    """Build the randomly initialized model.

    Args:
        recipe: sizes.
        extra_vocabulary: rows beyond the tokenizer's vocabulary; 0 for a model worth training, because the
            sampler gives such rows probability that no text can show.
    """
    common: dict[str, Any] = dict(
        vocab_size=len(VOCABULARY) + extra_vocabulary,
        hidden_size=recipe.hidden_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.key_value_heads,
        head_dim=recipe.head_dim,
        intermediate_size=recipe.intermediate_size,
        initializer_range=recipe.initializer_range,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
    if recipe.kind == "dense":
        model: PreTrainedModel = Qwen3ForCausalLM(Qwen3Config(**common))
    else:
        config = Qwen3MoeConfig(
            **common,
            moe_intermediate_size=recipe.expert_intermediate_size,
            num_experts=recipe.experts,
            num_experts_per_tok=recipe.experts_per_token,
            norm_topk_prob=True,
            router_aux_loss_coef=recipe.balance_loss,
            output_router_logits=False,
        )
        model = Qwen3MoeForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=EOS_ID, pad_token_id=PAD_ID)
    return model
