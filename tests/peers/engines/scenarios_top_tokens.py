"""The most likely tokens that vLLM reports to `Rollout`, beside the policy's own."""

from __future__ import annotations

import os

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


import torch
from mismatch_ext.adapters.vllm import Rollout
from transformers import AutoModelForCausalLM

from mismatch_ext.config import MismatchConfig
from mismatch_ext.rollout import SamplingSettings

TOP_K, TEMPERATURE = 6, 0.8
PROMPTS = [[3, 5, 7, 2], [4, 4, 9], [6, 3, 2, 8, 5]]


def heads(model: str) -> dict[str, float]:
    """Sample, and compare each head and each sampled token with the policy's own log-probabilities."""
    block = MismatchConfig.parse({"correction": {"centering": {"top_k": TOP_K}}})
    assert block is not None
    rollout = Rollout.launch(
        model, block, SamplingSettings(temperature=TEMPERATURE), max_new_tokens=12, n=2, dtype="float32", max_model_len=64,
        seed=0,
    )  # fmt: skip
    rollout.record_heads(TOP_K)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    found = {"apart": 0.0, "sampled": 0.0}
    for record in rollout.generate(PROMPTS):
        prompt, answer = (torch.tensor(ids.tolist()) for ids in (record.prompt_ids, record.response_ids))
        with torch.no_grad():
            logits = policy(input_ids=torch.cat([prompt, answer])[None]).logits[0, len(prompt) - 1 : -1]
        logprobs = (logits / TEMPERATURE).log_softmax(-1)
        assert record.head is not None and record.head.ids.shape == (len(answer), TOP_K)
        own = logprobs.gather(1, record.head.ids.long())
        # Equally likely tokens may change places, and their log-probabilities do not.
        for wanted in (own, logprobs.topk(TOP_K).values):
            found["apart"] = max(found["apart"], float((wanted - record.head.logprobs).abs().max()))
        of_sampled = logprobs.gather(1, answer[:, None])[:, 0]
        difference = of_sampled - torch.tensor(record.rollout_logprobs.tolist())
        found["sampled"] = max(found["sampled"], float(difference.abs().max()))
    rollout.shutdown()
    return found
