"""A stale prefix planted in a real vLLM: weights are updated, and the prefix cache keeps keys and values of those before."""

from __future__ import annotations

import os

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from mismatch_ext.adapters.doctor import sides
from mismatch_ext.adapters.doctor.asking import ToSample
from mismatch_ext.adapters.doctor.examining import examine
from mismatch_ext.adapters.vllm import weights
from mismatch_ext.adapters.vllm.doctor import VllmEngine
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from mismatch_ext.routing import RoutingShape

VOCABULARY, STEP = 320, 0.05
UNTOKENIZED = {"skip_tokenizer_init": True, "gpu_memory_utilization": 0.1, "enforce_eager": True}


def build(folder: Path, positions: int) -> LlamaForCausalLM:
    """Write and return a two-layer model whose policy is far from uniform."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=positions, bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3.0)
    model.save_pretrained(folder)
    return model


def step(model: nn.Module) -> None:
    """Move every weight."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(STEP * torch.randn(parameter.shape, generator=generator))


def prompts_of(count: int, length: int, seed: int = 0) -> list[list[int]]:
    """Return prompts of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (count, length), generator=generator).tolist()


def without_reset(planted: bool) -> Any:
    """Let weight updates leave the prefix cache as it is, if the fault is planted."""
    return patch.object(weights, "reset_prefix_cache", lambda llm: None) if planted else nullcontext()


@dataclass(frozen=True, kw_only=True)
class Live(sides.Run):
    """A run whose engine is one that lives already, and goes on living."""

    engine_of: ClassVar[VllmEngine]

    def start(self, shape: RoutingShape | None, lengths: Sequence[int] = ()) -> Any:
        """Return it."""
        return self.engine_of


def diagnosed(out: str, block_size: int, dtype: str = "float32") -> dict[str, Any]:
    """Let the doctor examine a live engine: with a warm cache, after an update without a reset, and after the reset.

    Args:
        out: Folder for the checkpoints.
        block_size: Tokens of a block of the cache.
        dtype: Both sides' dtype.
    """
    positions = 4 * block_size + 64
    before, after = Path(out) / "before", Path(out) / "after"
    model = build(before, positions)
    # All prompts in one pass: vLLM's CPU engine fails where a request with a seed is prefilled in pieces.
    sizes = {"max_model_len": positions, "max_num_batched_tokens": 24 * positions}
    arguments = {"block_size": block_size, **sizes, **UNTOKENIZED}
    engine = VllmEngine(str(before), dtype=dtype, arguments=arguments)
    prompts = prompts_of(24, 2 * block_size + 5)
    shared = {"dtype": dtype, "trainer_dtype": dtype, "sampling": {"temperature": 1.0, "seed": 0, "detokenize": False}}

    def found(folder: Path) -> dict[str, Any]:
        with patch.object(engine, "shutdown", lambda: None):
            run = Live(model=str(folder), **shared)  # type: ignore[arg-type]
            diagnosis = examine(run, prompts, responses=48, max_tokens=16, quick=True)
        return {
            "verdict": diagnosis.verdict,
            "causes": [[cause.key, cause.remedy.vllm] for cause in diagnosis.causes],
            "gap": diagnosis.gap["logp_abs_diff_mean"],
            "rungs": {rung.name: rung.mean for rung in diagnosis.rungs},
        }

    Live.engine_of = engine
    engine.sample(ToSample(prompts=prompts, responses=24, max_tokens=1, sampling=shared["sampling"]))  # type: ignore[arg-type]
    results = {"warm": found(before)}
    step(model)
    model.save_pretrained(after)
    with without_reset(planted=True):
        engine.update(model)
    results["stale"] = found(after)
    weights.reset_prefix_cache(engine._llm)
    results["reset"] = found(after)
    engine.shutdown()
    return results
