"""A tiny random model of every mixture-of-experts family that the installed transformers has.

Families are found by what their modeling code reads from a config, not by name. Sizes are set by the names of the config's
fields, which families share; `SPECIAL` has what cannot be guessed.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

VOCABULARY = 96
# No other size below is 12, so that a dimension of that size is one of experts.
_EXPERTS = {
    name: 12
    for name in ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "num_routed_experts")
}
_SIZES: dict[str, Any] = {
    **_EXPERTS,
    **dict.fromkeys(("top_k", "num_experts_per_tok", "moe_topk", "moe_k", "moe_top_k", "top_k_experts"), 2),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "d_model"), 32),
    **dict.fromkeys(("intermediate_size", "intermediate_size_mlp", "ffn_hidden_size"), 48),
    **dict.fromkeys(("d_ff", "encoder_ffn_dim", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_heads", "num_global_key_value_heads"), 4),
    **dict.fromkeys(("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "global_head_dim", "d_kv"), 8),
    **dict.fromkeys(
        (
            "kv_channels",
            "linear_head_dim",
            "linear_key_head_dim",
            "linear_value_head_dim",
            "hidden_size_per_layer_input",
        ),
        8,
    ),
    **dict.fromkeys(
        (
            "q_lora_rank",
            "kv_lora_rank",
            "o_lora_rank",
            "index_head_dim",
            "mamba_d_state",
            "ssm_state_size",
            "mamba_chunk_size",
        ),
        16,
    ),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("shared_intermediate_size", "moe_shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("max_position_embeddings", "max_seq_len"), 128),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "mamba_head_dim", "linear_num_value_heads"), 8),
    **dict.fromkeys(("linear_num_heads", "linear_num_key_heads", "n_group"), 4),
    **dict.fromkeys(("zero_expert_num", "topk_group"), 2),
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SPECIAL: dict[str, dict[str, Any]] = {
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 32, "hidden_size": 32, "moe_num_experts": 12, "moe_top_k": 2},
    },
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "doge": {"is_moe": True},
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [16, 16],
        "rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]},
    },
    "gemma4_text": {"enable_moe_block": True},
    # Its attention takes no positions.
    "glm5_next_text": {"qk_rope_head_dim": 0},
    "glm4v_moe_text": {"rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2], "partial_rotary_factor": 1.0}},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba", "attention"]},
    "hy_v4_vl_text": {"rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]}},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    # Layers with a window have twice as many heads of keys.
    "mimo_v2_flash": {
        "num_key_value_heads": 2,
        "rope_parameters": {
            "full_attention": {**_ROPE, "partial_rotary_factor": 1.0},
            "sliding_attention": {**_ROPE, "partial_rotary_factor": 1.0},
        },
    },
    "nemotron_h": {"layers_block_type": ["mamba", "moe", "attention", "moe"]},
    # This config has a default for no field of that name, which its model reads.
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 16},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "step3p5": {"sliding_window": 8},
    "vitpose_backbone": {"image_size": [32, 32], "patch_size": [16, 16], "part_features": 16},
    "zaya": {"num_experts_per_tok": 1},
}
# Settings of a family that route in another way and are proven, or refused, beside the default.
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "deepseek_v2": {"topk_method=group_limited_greedy": {"topk_method": "group_limited_greedy"}},
    # Two experts of one group of all: its top-k over the group is of the shape of that over the experts.
    "deepseek_v3": {"1 group": {"n_group": 1, "topk_group": 1}},
    "deepseek_v4": {"no hash layers": {"mlp_layer_types": ["moe"] * 4}},
    # Of 12 tokens each attends to the 4 that an indexer selects by a top-k of its own.
    "glm_moe_dsa": {"index_topk=4": {"index_topk": 4}},
    "olmoe": {"norm_topk_prob": {"norm_topk_prob": True}},
    "qwen3_moe": {"norm_topk_prob, dense layer": {"norm_topk_prob": True, "mlp_only_layers": [1]}},
    "lfm2_moe": {"no expert bias": {"use_expert_bias": False}},
    "llama4_text": {"1 expert per token": {"num_experts_per_tok": 1}},
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family, or a variant of it.

    Args:
        name: `model_type`, and the variant in brackets.
        config: Its config class.
        model: The class that is built: the causal language model, or else the text backbone.
        settings: What is set beyond the sizes that all families share.
    """

    name: str
    config: type[PreTrainedConfig]
    model: type[PreTrainedModel]
    settings: dict[str, Any]

    def sized(self) -> PreTrainedConfig:
        """Return its config, of the sizes that all families share."""
        known = {field.name: field.default for field in dataclasses.fields(self.config)}
        sizes = {name: size for name, size in _SIZES.items() if name in known}
        # Noise would make two passes differ.
        sizes |= {
            name: 0.0
            for name, default in known.items()
            if isinstance(default, float) and re.search("dropout|jitter", name)
        }
        return self.config(**{**sizes, **self.settings})

    def build(self, dtype: torch.dtype = torch.float32, *, experts: str | None = None) -> nn.Module:
        """Return a model in training mode, with the same random weights at every call.

        Args:
            dtype: Of parameters and buffers.
            experts: Implementation of the experts: "eager", "batched_mm", "grouped_mm"; None for eager where it can be set.
        """
        config = self.sized()
        config._experts_implementation = experts or "eager"
        with torch.random.fork_rng(
            devices=[]
        ):  # vectors keep what the family initializes them with, which may be random
            torch.manual_seed(1)
            built = self.model._from_config(config, attn_implementation="eager", dtype=torch.float32)
        model: nn.Module = built.to(dtype).train()
        randomise(model)
        return model


def randomise(model: nn.Module) -> None:
    """Give a model random weights, the same at every call."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(0.15 * torch.randn(parameter.shape, generator=generator))
        for name, buffer in model.named_buffers():
            # Zero at initialization; random, a bias that only selects shows whether it also weighs.
            if name.endswith("bias") and buffer.is_floating_point():
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))


def families() -> Iterator[Family]:
    """Yield every family of the installed transformers whose modeling code reads a number of experts."""
    reads = re.compile(rf"config\.({'|'.join(_EXPERTS)})\b")
    for path in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        if not reads.search(path.read_text(encoding="utf-8")):
            continue
        module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
        for config, models in _models(module).items():
            fields = {field.name for field in dataclasses.fields(config)} | {*(config.attribute_map or {})}
            if not config.model_type or not (fields & {*_EXPERTS} or "ffn_config" in fields):
                continue
            model, settings = min(models, key=_preference), SPECIAL.get(config.model_type, {})
            yield Family(name=config.model_type, config=config, model=model, settings=settings)
            for variant, more in VARIANTS.get(config.model_type, {}).items():
                name = f"{config.model_type} ({variant})"
                yield Family(name=name, config=config, model=model, settings={**settings, **more})


def _models(module: Any) -> dict[type[PreTrainedConfig], list[type[PreTrainedModel]]]:
    """Return the model classes of a module by config."""
    found: dict[type[PreTrainedConfig], list[type[PreTrainedModel]]] = {}
    for value in vars(module).values():
        if not inspect.isclass(value) or not issubclass(value, PreTrainedModel) or value.__module__ != module.__name__:
            continue
        config: Any = getattr(value, "config_class", None)
        if config is not None and not value.__name__.endswith("PreTrainedModel"):
            found.setdefault(config, []).append(value)
    return found


def _preference(model: type[PreTrainedModel]) -> int:
    order = ("ForCausalLM", "TextModel", "Model", "ForConditionalGeneration")
    return next((rank for rank, ending in enumerate(order) if model.__name__.endswith(ending)), len(order))
