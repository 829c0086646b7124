"""A tiny random model that mixes experts and sees images, with a batch that has an image in each row.

Shapes: B rows, S positions, P patches of an image.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tests.oracles.routing.tiny import VOCABULARY, families, randomise

IMAGE, VIDEO, START, END = 90, 91, 92, 93
TOKENS = 4
"""Tokens that an image becomes; it has four times as many patches."""
_PATCH = 4
_VISION: dict[str, Any] = {
    "depth": 2, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24, "out_hidden_size": 32, "patch_size": _PATCH,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3, "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 1],
}  # fmt: skip
_IDS: dict[str, Any] = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
_TEXT = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
    "mlp_only_layers": [1],
}


def whole_model() -> nn.Module:
    """Return Qwen3-VL-MoE, vision tower and text model, in evaluation mode; the same weights at every call."""
    family = next(family for family in families() if family.name == "qwen3_vl_moe_text")
    told = {key: value for key, value in family.sized().to_dict().items() if value is not None} | _TEXT
    config = transformers.Qwen3VLMoeConfig(text_config=told, vision_config=_VISION, **_IDS)
    config._experts_implementation = "eager"
    torch.manual_seed(1)
    model: Any = transformers.Qwen3VLMoeForConditionalGeneration._from_config(
        config, attn_implementation="eager", dtype=torch.float32
    )
    randomise(model)
    whole: nn.Module = model.eval()
    return whole


def batch() -> dict[str, Tensor]:
    """Return two rows of text around an image each, of 14 and 12 tokens, the second padded on the right."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(3, IMAGE, (2, 14), generator=generator)
    for row, first in enumerate((3, 5)):
        ids[row, first - 1], ids[row, first : first + TOKENS], ids[row, first + TOKENS] = START, IMAGE, END
    mask = torch.ones_like(ids)
    ids[1, 12:], mask[1, 12:] = 0, 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    patches = 4 * TOKENS
    return inputs | {
        "pixel_values": torch.randn(2 * patches, 3 * 2 * _PATCH * _PATCH, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * 2),
        "mm_token_type_ids": (ids == IMAGE).long(),
    }


def image_rows(inputs: dict[str, Tensor]) -> Tensor:
    """Return which rows of a forward pass are of images `[B * S]`."""
    return (inputs["input_ids"] == IMAGE).flatten()


assert VOCABULARY > END
