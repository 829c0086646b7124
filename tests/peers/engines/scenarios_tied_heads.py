"""Weight updates of CPU engines whose output head shares its weights with the embeddings: gap and comparison after each."""

from __future__ import annotations

import os

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ["VLLM_SERVER_DEV_MODE"] = "1"  # so that this package's transfer of weights to servers is registered

from copy import deepcopy
from typing import Any
from unittest.mock import patch

import torch
import transformers
from mismatch_ext.adapters.vllm import head, update_weights, weights
from mismatch_ext.adapters.vllm.engine import shutdown
from mismatch_ext.adapters.vllm.remote import _base64
from mismatch_ext.adapters.vllm.server.plugin import BACKEND
from mismatch_ext.adapters.vllm.side import InProcess
from torch import nn
from vllm import LLM
from vllm.config import WeightTransferConfig

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
GEMMA: dict[str, Any] = {"sliding_window": 128, "query_pre_attn_scalar": 32}
STEP = 0.05
"""Standard deviation of what an update adds to each weight."""


def build(kind: str, vocabulary: int, *, tied: bool) -> nn.Module:
    """Return a two-layer model whose policy is far from uniform, so that a stale head shows in its log-probabilities."""
    size = {**SIZES, "vocab_size": vocabulary, "tie_word_embeddings": tied}
    configs = {
        "llama": transformers.LlamaConfig(**size),
        "qwen3": transformers.Qwen3Config(**size),
        "gemma": transformers.GemmaConfig(**size),
        "gemma3": transformers.Gemma3TextConfig(**size, **GEMMA),
    }
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(configs[kind], dtype=torch.float32).eval()
    wider = 1.5 if kind.startswith("gemma") else 3.0
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(wider)
    return model


def send(llm: LLM, model: nn.Module, way: str) -> None:
    """Send a model's weights to an engine.

    Args:
        llm: The engine.
        model: The trainer's model.
        way: "in process", "to a server" (what a server's worker does), or "reload" (vLLM's own, without a repair).
    """
    if way == "in process":
        update_weights(llm, model.named_parameters())
    elif way == "reload":
        with patch.object(weights, "repack_tied_heads", lambda model: None):
            update_weights(llm, model.named_parameters())
    else:
        llm.start_weight_update()
        for name, values in model.named_parameters():
            info = {
                "names": [name],
                "dtypes": ["float32"],
                "shapes": [list(values.shape)],
                "data": [_base64(values.detach())],
            }
            llm.llm_engine.collective_rpc("update_weights", kwargs={"update_info": info})
        llm.finish_weight_update()
        llm.reset_prefix_cache()


def updated(out: str, kind: str, vocabulary: int, tied: bool, dtype: str, way: str = "in process") -> dict[str, Any]:
    """Update an engine twice, and compare it with the trainer's model before, between and after.

    Args:
        out: Folder for the checkpoint.
        kind: Family of the model.
        vocabulary: Its number of tokens; vLLM pads it to a multiple of 64.
        tied: Whether the head shares its weights with the embeddings.
        dtype: Both sides' dtype.
        way: How the weights are sent, as for `send`.
    """
    model = build(kind, vocabulary, tied=tied)
    model.save_pretrained(out)  # type: ignore[operator]
    llm = LLM(
        out, dtype=dtype, enforce_eager=True, max_model_len=128, skip_tokenizer_init=True,
        weight_transfer_config=WeightTransferConfig(backend=BACKEND),
    )  # fmt: skip
    side = InProcess(llm)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, vocabulary, (4, 24), generator=generator)
    looks = []

    def look() -> None:
        trainers = _logprobs(model, tokens, getattr(torch, dtype))
        heads = [one for one in side.compare({}, {}) if one.name == head.OUTPUT_HEAD]
        looks.append(
            {
                "gap": float((side.score(tokens) - trainers).abs().mean()),
                "head is its weights": [h.equal for h in heads],
            }
        )

    try:
        look()
        for _ in range(2):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn(parameter.shape, generator=generator) * STEP)
            send(llm, model, way)
            look()
    finally:
        shutdown(llm)
    return {"looks": looks}


def _logprobs(model: nn.Module, tokens: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a copy's log-probabilities `[N, T-1]`, float64, in a dtype."""
    with torch.no_grad():
        logits = deepcopy(model).to(dtype)(tokens).logits.float()
    return logits.log_softmax(-1)[:, :-1].gather(2, tokens[:, 1:, None])[..., 0].double()
