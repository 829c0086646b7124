"""A tiny checkpoint of a model that mixes experts and sees images, with the processor that turns an image into tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.oracles.routing.tiny import randomise

VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
SPECIAL = ("<pad>", "<eos>", *VISION)
TEXT = "1+2<|vision_start|><|image_pad|><|vision_end|>abc="
PATCH, IMAGE_TOKENS = 16, 4


def images() -> tuple[Image.Image, Image.Image]:
    """Return an image that becomes four tokens, and its negative."""
    pixels = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    return Image.fromarray(pixels), Image.fromarray(255 - pixels)


def save_tiny(folder: Path) -> None:
    """Save a random Qwen3-VL-MoE of four layers of 16 experts, as its published checkpoints are laid out."""
    vocabulary = [*SPECIAL, *"0123456789+=abcdefghijklmnopqrstuvwxyz .\n<>"]
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token="."))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", additional_special_tokens=list(VISION)
    )
    size = {"shortest_edge": 32 * 32, "longest_edge": 64 * 64}
    cut: dict[str, Any] = {"patch_size": PATCH, "merge_size": 2, "temporal_patch_size": 2}
    transformers.Qwen3VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(size=size, **cut),
        tokenizer=tokenizer,
        video_processor=transformers.Qwen3VLVideoProcessor(**cut),
    ).save_pretrained(folder)
    ids = dict(zip(SPECIAL, tokenizer.convert_tokens_to_ids(list(SPECIAL)), strict=True))
    text = {
        "vocab_size": len(tokenizer), "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
        "intermediate_size": 96, "moe_intermediate_size": 24, "max_position_embeddings": 512, "num_hidden_layers": 4,
        "num_experts": 16, "num_experts_per_tok": 4, "norm_topk_prob": True, "bos_token_id": None, "tie_word_embeddings": False,
        "eos_token_id": ids["<eos>"], "pad_token_id": ids["<pad>"],
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5], "mrope_interleaved": True,
        },
    }  # fmt: skip
    # SGLang 0.5.18 adds what three layers of the tower say, whatever the config says.
    vision = {
        "depth": 3, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 64, "patch_size": PATCH,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1, 2],
    }  # fmt: skip
    config = transformers.Qwen3VLMoeConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )
    model: Any = transformers.Qwen3VLMoeForConditionalGeneration._from_config(config, dtype=torch.float32)
    randomise(model)
    model.save_pretrained(folder)
    # transformers 5 turns published experts around when it loads them, and does not turn them back.
    file = folder / "model.safetensors"
    weights = {
        name: weight.transpose(1, 2).contiguous() if ".experts." in name and weight.dim() == 3 else weight
        for name, weight in load_file(file).items()
    }
    save_file(weights, file, metadata={"format": "pt"})
