"""Rollout routing replay (R3) in a training loop of one's own: a model, an optimizer, vLLM, and no trainer.

    python examples/r3_loop.py --steps 5

vLLM records which experts each token went to, and the trainer replays them, so that both compute the same function of the same
weights. Each step prints the gap to the engine on the step's own tokens, without replay and with it, the share of (token, layer)
pairs whose experts the trainer would have chosen otherwise, and the share of tokens that replay moves; the step trains with it.
Every line that R3 needs is marked.
"""

from __future__ import annotations

import os

# Before vLLM is imported: the engine in this process, where its weights can be updated, with a small KV cache.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import argparse
import sys
from pathlib import Path
from typing import Any

# Run as a file, Python would look for modules in examples/ only.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from mismatch_ext.adapters import vllm as engine
from mismatch_ext.adapters.transformers.routing import moe_layout, replay_routing
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm import LLM, SamplingParams

from examples.arithmetic.pretrain import ensure_model
from examples.arithmetic.task import FAMILIAR_DIGITS, make_dataset, reward
from mismatch_ext.metrics import mismatch_metrics
from mismatch_ext.routing import agreement, align

PROMPTS, SAMPLES, LEARNING_RATE = 16, 8, 5e-5
SAMPLING = SamplingParams(n=SAMPLES, temperature=1.0, max_tokens=112, logprobs=0)


def batch(outputs: list[Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens and attention mask, padded on the right, and the engine's log-probabilities, NaN where none were sampled."""
    tokens, logprobs = [], []
    for output in outputs:
        for completion in output.outputs:
            tokens.append(torch.tensor([*output.prompt_token_ids, *completion.token_ids]))
            sampled = [top[token].logprob for token, top in zip(completion.token_ids, completion.logprobs, strict=True)]
            logprobs.append(torch.tensor([torch.nan] * len(output.prompt_token_ids) + sampled))
    attention = pad_sequence([torch.ones_like(row) for row in tokens], batch_first=True)
    return pad_sequence(tokens, batch_first=True), attention, pad_sequence(logprobs, True, padding_value=torch.nan)


def score(model: torch.nn.Module, tokens: Tensor, attention: Tensor) -> Tensor:
    """Return log-probabilities `[B, S-1]` of tokens 1 to S-1."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=tokens, attention_mask=attention, use_cache=False).logits[:, :-1]
    return logits.float().log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)


def main() -> None:
    """Train by REINFORCE with the mean of each prompt's samples as baseline."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument(
        "--model-cache", type=Path, default=Path(".cache/models"), help="Where trained models are kept."
    )
    options = parser.parse_args()
    path = str(ensure_model("moe", options.model_cache))
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    recording = {"enable_return_routed_experts": True}  # R3
    llm = LLM(path, dtype="bfloat16", enforce_eager=True, max_model_len=160, seed=0, **recording)
    shape = moe_layout(model).shape  # R3: the MoE layers, experts per layer and experts per token
    rows = make_dataset(PROMPTS * options.steps, FAMILIAR_DIGITS, seed=1000)
    for step in tqdm(range(options.steps), unit="step"):
        problems = rows[step * PROMPTS : (step + 1) * PROMPTS]
        prompts = [{"prompt_token_ids": tokenizer(row["prompt"]).input_ids} for row in problems]
        outputs = llm.generate(prompts, SAMPLING, use_tqdm=False)
        tokens, attention, sampled = batch(outputs)
        sampled, mask = sampled[:, 1:], ~sampled[:, 1:].isnan()
        traces = engine.to_traces(outputs, shape=shape, version=step)  # R3: checked, a trace per completion
        trace, recorded = align(traces, attention)  # R3: laid along the padded batch

        with torch.no_grad():  # for comparison only
            own = score(model, tokens, attention)
        native = mismatch_metrics(own, sampled, mask)
        # R3; a checkpointed backward pass may come after the block. `native=True` is for the comparison only.
        with replay_routing(model, trace, recorded, native=True) as replay:
            logprobs = score(model, tokens, attention)
        flips = agreement(trace, replay.native, recorded, real=attention.bool().flatten()).metrics()
        moved = (own != logprobs.detach())[mask].float().mean()
        replayed = mismatch_metrics(logprobs.detach(), sampled, mask)

        rewards = torch.tensor(
            [
                reward([c.text for c in output.outputs], [row["a"]] * SAMPLES, [row["b"]] * SAMPLES)
                for output, row in zip(outputs, problems, strict=True)
            ]
        )
        advantages = (rewards - rewards.mean(1, keepdim=True)).view(-1, 1)
        loss = -(advantages * logprobs * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        engine.update_weights(llm, model.named_parameters())  # also forgets cached prefixes and their routes
        tqdm.write(
            f"step {step + 1}: reward {rewards.mean():.2f}, k3 {native['k3_kl']:.1e} -> {replayed['k3_kl']:.1e} with replay, "
            f"max|Δlogp| {native['logp_abs_diff_max']:.2f} -> {replayed['logp_abs_diff_max']:.2f}, "
            f"flips {flips['routing/set_mismatch_frac']:.2e}, moved {moved:.2e}"
        )
    engine.shutdown(llm)


if __name__ == "__main__":
    main()
