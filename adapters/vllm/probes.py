"""Log-probabilities that the engine assigns to given tokens and to tokens that it decodes, for checking its weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from uuid import uuid4

import torch
from torch import Tensor

from mismatch_ext.errors import asking_engine
from mismatch_ext.rng import forked_rng
from mismatch_ext.weights import Decoded

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.logprobs import Logprob


def prefill_params() -> SamplingParams:
    """Return parameters of a request that scores its prompt, as temperature 1 does, and leaves random numbers as they are."""
    from vllm import SamplingParams

    # vLLM insists on decoding one token. Its runner for GPUs draws a seed for each request that has none, even for a greedy
    # one, from NumPy's global generator. Later rollouts and reward functions would then get other numbers.
    return SamplingParams(max_tokens=1, temperature=0.0, seed=0, prompt_logprobs=0, detokenize=False)


def score_tokens(llm: LLM, token_ids: list[list[int]]) -> Tensor:
    """Score fixed token sequences with the engine's present weights.

    Scores come from the prompt path, at temperature 1 and without truncation of the support. Random numbers stay as they are.

    Args:
        llm: An engine in this process.
        token_ids: N sequences of the same length T.

    Returns:
        Log-probabilities `[N, T-1]`, float64, of tokens 1..T-1 given those before them.

    Raises:
        EngineError: The engine fails.
    """
    prompts: list[TokensPrompt] = [{"prompt_token_ids": list(ids)} for ids in token_ids]
    params = prefill_params()
    with asking_engine("score probe tokens"):
        outputs = llm.generate(prompts, params, use_tqdm=False)
    rows = [
        [entry[token].logprob for entry, token in zip(_after_first(out), ids[1:], strict=True)]
        for out, ids in zip(outputs, token_ids, strict=True)
    ]
    return torch.tensor(rows, dtype=torch.float64)


def of_no_cache(prompts: Sequence[Sequence[int]]) -> list[TokensPrompt]:
    """Return prompts that meet nothing in an engine's prefix cache: a salt of their own is part of the cache's keys."""
    salt = uuid4().hex
    return [{"prompt_token_ids": list(ids), "cache_salt": salt} for ids in prompts]


def decode_tokens(llm: LLM, token_ids: list[list[int]], count: int, *, afresh: bool = False) -> Decoded:
    """Sample tokens after prompts with the engine's present weights, at temperature 1 and without truncation.

    Each request has its own seed, and an end-of-sequence token does not end it. The engine's random numbers stay as they are.

    Args:
        llm: An engine in this process.
        token_ids: N prompts of the same length P.
        count: Number of tokens to sample after each prompt.
        afresh: Whether nothing of the prompts is taken from the prefix cache.

    Raises:
        EngineError: The engine fails.
    """
    from vllm import SamplingParams

    sampling = [
        SamplingParams(max_tokens=count, temperature=1.0, seed=row, ignore_eos=True, logprobs=0, detokenize=False)
        for row in range(len(token_ids))
    ]
    prompts: list[TokensPrompt] = [{"prompt_token_ids": list(ids)} for ids in token_ids]
    if afresh:
        prompts = of_no_cache(token_ids)
    # Even for requests with seeds, vLLM's CPU sampler also draws from torch's global generator, and drops what it drew.
    with forked_rng(torch.device("cpu")), asking_engine("decode after probe tokens"):
        requests = llm.generate(prompts, sampling, use_tqdm=False)
    outputs = [request.outputs[0] for request in requests]
    logprobs = [
        [entry[token].logprob for entry, token in zip(filter(None, out.logprobs or ()), out.token_ids, strict=True)]
        for out in outputs
    ]
    tokens = [[*ids, *out.token_ids] for ids, out in zip(token_ids, outputs, strict=True)]
    return Decoded(tokens=torch.tensor(tokens), logprobs=torch.tensor(logprobs, dtype=torch.float64))


def _after_first(output: RequestOutput) -> list[dict[int, Logprob]]:
    """Return the log-probabilities of a prompt's tokens; the first token has none and is left out."""
    assert output.prompt_logprobs is not None  # asked for
    return [entry for entry in output.prompt_logprobs[1:] if entry is not None]
