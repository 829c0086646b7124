"""The most likely tokens that vLLM reports to `Rollout`: as flat arrays and as objects, beside the policy's own."""

from __future__ import annotations

import os

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from typing import Any
from unittest.mock import patch

import torch
from mismatch_ext.adapters.vllm import Rollout, rollouts, side
from mismatch_ext.adapters.vllm.heads import head_of, is_flat
from transformers import AutoModelForCausalLM

from mismatch_ext.config import MismatchConfig
from mismatch_ext.rollout import SamplingSettings

TOP_K, TEMPERATURE = 6, 0.8
PROMPTS = [[3, 5, 7, 2], [4, 4, 9], [6, 3, 2, 8, 5]]


def heads(model: str) -> dict[str, Any]:
    """Sample twice, with flat log-probabilities and without them, and compare each head with the policy's own top tokens."""
    block = MismatchConfig.parse({"correction": {"centering": {"top_k": TOP_K}}})
    assert block is not None
    rollout = Rollout.launch(
        model, block, SamplingSettings(temperature=TEMPERATURE), max_new_tokens=12, n=2, dtype="float32", max_model_len=64,
        seed=0,
    )  # fmt: skip
    rollout.record_heads(TOP_K)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    found: dict[str, Any] = {}
    flat: list[bool] = []

    def noted(tops: Any, top_k: int) -> Any:
        flat.append(is_flat(tops))
        return head_of(tops, top_k)

    for name, arguments in (("flat", side.flat_logprobs()), ("objects", {})):
        flat.clear()
        with (
            patch.object(side, "flat_logprobs", lambda given=arguments: given),
            patch.object(rollouts, "head_of", noted),
        ):
            records = rollout.generate(PROMPTS)
        apart = sampled_apart = 0.0
        for record in records:
            prompt, answer = (torch.tensor(ids.tolist()) for ids in (record.prompt_ids, record.response_ids))
            with torch.no_grad():
                logits = policy(input_ids=torch.cat([prompt, answer])[None]).logits[0, len(prompt) - 1 : -1]
            logprobs = (logits / TEMPERATURE).log_softmax(-1)
            assert record.head is not None
            own = logprobs.gather(1, record.head.ids.long())
            # Equally likely tokens may change places, and their log-probabilities do not.
            apart = max(apart, float((own - record.head.logprobs).abs().max()))
            apart = max(apart, float((logprobs.topk(TOP_K).values - record.head.logprobs).abs().max()))
            of_sampled = logprobs.gather(1, answer[:, None])[:, 0]
            difference = of_sampled - torch.tensor(record.rollout_logprobs.tolist())
            sampled_apart = max(sampled_apart, float(difference.abs().max()))
        found[name] = {
            "were flat": list(flat), "shapes": [list(record.head.ids.shape) for record in records if record.head is not None],
            "lengths": [len(record.response_ids) for record in records], "apart": apart, "sampled": sampled_apart,
        }  # fmt: skip
    rollout.shutdown()
    return found
