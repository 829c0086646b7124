"""The policies that are measured: random Qwen3 models of a few sizes, dense or with experts, or a checkpoint from disk."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from mismatch_ext.adapters.doctor.prompts import read_prompts
from mismatch_ext.adapters.transformers.doctor.models import load_model, routing_shape
from torch import Tensor, nn
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks.gpu.part import Setting
from mismatch_ext.errors import ConfigError

# Standard deviation of a random model's logits: a few tokens then have most of the probability, as in a trained model.
SPREAD = 3.0
PROMPTS = (
    "Janet has 16 eggs, eats three and bakes with four. She sells the rest for two dollars each. How much does she make? "
    "Think step by step, and give the answer at the end.",
    "Prove that the sum of two even numbers is even. Write the proof in three lines, name what you use, and say where.",
    "Write a Python function that returns the longest common prefix of a list of strings. Explain why it is correct.",
    "A train leaves at nine at eighty kilometres an hour; another leaves at ten at a hundred. When do they meet, and where?",
)


@dataclass(frozen=True, kw_only=True)
class Size:
    """Dimensions of a random model: of transformers' Qwen3, and of its experts."""

    hidden: int
    layers: int
    heads: int
    key_value_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    experts: int
    top_k: int
    expert_intermediate: int


SIZES = {
    "tiny": Size(
        hidden=64, layers=2, heads=2, key_value_heads=1, head_dim=32, intermediate=128, vocabulary=256, experts=8, top_k=2,
        expert_intermediate=32,
    ),
    "small": Size(
        hidden=512, layers=8, heads=8, key_value_heads=4, head_dim=64, intermediate=1536, vocabulary=32_768, experts=32, top_k=4,
        expert_intermediate=256,
    ),
    # 1.4 billion parameters dense, 1.5 with experts.
    "1b": Size(
        hidden=2048, layers=16, heads=16, key_value_heads=8, head_dim=128, intermediate=6144, vocabulary=151_936, experts=64,
        top_k=8, expert_intermediate=256,
    ),
}  # fmt: skip


def random_model(kind: str, size: Size, *, device: str, seed: int) -> nn.Module:
    """Return a random model in float32, in evaluation mode.

    Args:
        kind: "dense" or "experts".
        size: Its dimensions.
        device: Where it is made.
        seed: Of its weights.
    """
    fields: dict[str, Any] = {
        "vocab_size": size.vocabulary,
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.key_value_heads,
        "head_dim": size.head_dim,
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    gpus = [torch.device(device)] if torch.device(device).type == "cuda" else []
    with torch.random.fork_rng(devices=gpus), torch.device(device):
        torch.manual_seed(seed)
        if kind == "dense":
            model: nn.Module = Qwen3ForCausalLM(Qwen3Config(**fields))
        else:
            model = Qwen3MoeForCausalLM(
                Qwen3MoeConfig(
                    **fields,
                    num_experts=size.experts,
                    num_experts_per_tok=size.top_k,
                    moe_intermediate_size=size.expert_intermediate,
                    norm_topk_prob=True,
                )
            )
        with torch.no_grad():
            model.lm_head.weight.normal_(std=SPREAD / math.sqrt(size.hidden))
    model.generation_config.eos_token_id = None
    return model.float().eval()


def policy(kind: str, setting: Setting) -> tuple[nn.Module, str]:
    """Return the model that a part measures, in float32, and what it is.

    Args:
        kind: "dense", "experts", or "any" for whichever the checkpoint is.
        setting: A checkpoint that it names is taken where it is of this kind.
    """
    if setting.model:
        model = load_model(setting.model).to(setting.device)
        found = "dense" if routing_shape(model) is None else "experts"
        if kind in ("any", found):
            return model, f"checkpoint {Path(setting.model).name}"
    made = "dense" if kind == "any" else kind
    model = random_model(made, SIZES[setting.size], device=setting.device, seed=setting.seed)
    return model, said_of(model, made)


def said_of(model: nn.Module, kind: str) -> str:
    """Return what a random model is, for a reader."""
    count = sum(p.numel() for p in model.parameters())
    return f"random Qwen3, {kind}, {count / 1e6:.3g} million parameters"


def prompts_of(model: nn.Module, setting: Setting, count: int) -> Tensor:
    """Return prompts of equal length `[count, P]`, int64: a checkpoint's own words, or random tokens.

    A checkpoint without a tokenizer gets random tokens, too.

    Raises:
        ConfigError: The tokenizer cannot encode the prompts.
    """
    width: int = model.config.get_text_config().vocab_size  # type: ignore[union-attr, operator]
    named = bool(setting.model) and model.name_or_path == setting.model
    if named and (setting.prompts or any(Path(setting.model).glob("tokenizer*"))):
        rows = read_prompts(Path(setting.prompts), setting.model) if setting.prompts else _built_in(setting.model)
        length = min(setting.prompt_tokens, *map(len, rows))
        ids = torch.tensor([row[:length] for row in rows])
        return ids.repeat(-(-count // len(ids)), 1)[:count].to(setting.device)
    generator = torch.Generator().manual_seed(setting.seed + 1)
    return torch.randint(width, (count, setting.prompt_tokens), generator=generator).to(setting.device)


def _built_in(model: str) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    try:
        return [tokenizer(text)["input_ids"] for text in PROMPTS]
    except Exception as error:  # what tokenizers raises has no type of its own
        raise ConfigError(
            f"--model: the tokenizer of {model} does not know the prompts that are built in ({error}); give --prompts FILE."
        ) from error


def in_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a copy whose parameters are in another dtype; buffers keep theirs, as when a checkpoint is loaded."""
    made = copy.deepcopy(model)
    for parameter in made.parameters():
        parameter.data = parameter.data.to(dtype)
    return made


def rounded(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a float32 copy whose weights another dtype holds exactly: what an oracle of that dtype computes with."""
    made = copy.deepcopy(model)
    for parameter in made.parameters():
        parameter.data = parameter.data.to(dtype).float()
    return made
