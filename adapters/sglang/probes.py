"""Log-probabilities that SGLang gives to fixed tokens and to tokens that it decodes, to check its weights."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch
from mismatch_ext.adapters.sglang.answers import parse_sampled, token_scores
from mismatch_ext.adapters.sglang.engine import Transport
from mismatch_ext.adapters.sglang.request import generate_request
from torch import Tensor

from mismatch_ext.errors import NonFiniteLogprobError, RecordError
from mismatch_ext.rollout import SamplingSettings
from mismatch_ext.weights import Decoded

# Greedy at temperature 1: scoring draws no random number, so it leaves the engine's sampling as it was.
SCORING = SamplingSettings(temperature=1.0, top_k=1)


def score_tokens(transport: Transport, token_ids: Sequence[Sequence[int]]) -> Tensor:
    """Score token sequences `[N, T]` with the engine's weights, at temperature 1 and without the prefix cache.

    Returns:
        Log-probabilities `[N, T-1]`, float64, of all tokens but the first; NaN where the engine's is not finite.

    Raises:
        EngineError: The engine failed or was not reached.
        RecordError: A response is not the score of its sequence.
    """
    prompts = [list(map(int, ids)) for ids in token_ids]
    outputs = transport.generate(generate_request(prompts, SCORING, max_new_tokens=0, prompt_logprobs=True))
    if len(outputs) != len(prompts):
        raise RecordError(f"{len(outputs)} responses for {len(prompts)} sequences that were to be scored.")
    largest = max(map(max, prompts))
    rows = [
        token_scores(output, ids, row, largest) for row, (output, ids) in enumerate(zip(outputs, prompts, strict=True))
    ]
    return torch.tensor(rows, dtype=torch.float64)


def decode_tokens(transport: Transport, token_ids: Sequence[Sequence[int]], count: int) -> Decoded:
    """Decode the likeliest `count` tokens after prompts `[N, P]`; log-probabilities are at temperature 1.

    Tokens are not drawn, because a draw would change the engine's random numbers for other requests. An end token does not end
    the decoding.

    Returns:
        Prompts and decoded tokens `[N, P + count]`, and log-probabilities `[N, count]`, float64; a row is NaN where the engine's
        are not all finite.

    Raises:
        EngineError: The engine failed or was not reached.
        RecordError: A response is malformed, or has another number of tokens.
    """
    prompts = [list(map(int, ids)) for ids in token_ids]
    outputs = transport.generate(generate_request(prompts, SCORING, max_new_tokens=count, ignore_eos=True))
    tokens, logprobs = [], []
    for ids, output in zip(prompts, outputs, strict=True):
        sampled, scores = (0,) * count, (float("nan"),) * count
        with suppress(NonFiniteLogprobError):
            sampled, scores = parse_sampled(output, len(ids))
        if len(sampled) != count:
            raise RecordError(
                f"{len(sampled)} tokens were decoded after a probe; allowed: the {count} that were asked for."
            )
        tokens.append([*ids, *sampled])
        logprobs.append(scores)
    return Decoded(tokens=torch.tensor(tokens), logprobs=torch.tensor(logprobs, dtype=torch.float64))
