"""Log-probabilities that SGLang gives to fixed tokens and to tokens that it decodes, to check its weights."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch
from mismatch_ext.adapters.sglang.fields import brief, is_integer, number
from mismatch_ext.adapters.sglang.request import generate_request
from mismatch_ext.adapters.sglang.response import parse_sampled
from mismatch_ext.adapters.sglang.transport import Transport
from torch import Tensor

from mismatch_ext.errors import NonFiniteLogprobError, RecordError
from mismatch_ext.records import SamplingSettings
from mismatch_ext.weights import Decoded

FIELD = "meta_info.input_token_logprobs"
# Greedy at temperature 1: scoring draws no random number, so it leaves the engine's sampling as it was.
SCORING = SamplingSettings(temperature=1.0, top_k=1)
TOLERANCE = 1e-6
"""Largest value in nats that a log-probability may have after rounding in float32."""


def score_tokens(transport: Transport, token_ids: Sequence[Sequence[int]]) -> Tensor:
    """Score fixed token sequences with the engine's current weights, at temperature 1.

    The sequences are computed anew, without the prefix cache.

    Args:
        transport: The engine.
        token_ids: N sequences of the same length T, at least 2.

    Returns:
        Log-probabilities `[N, T-1]`, float64, of tokens 1..T-1 given those before them; NaN where the engine's is not finite.

    Raises:
        EngineError: The engine failed or was not reached.
        RecordError: A response is not the score of its sequence.
    """
    prompts = [list(map(int, ids)) for ids in token_ids]
    request = generate_request(prompts, SCORING, max_new_tokens=0, prompt_logprobs=True)
    outputs = transport.generate(request)
    if len(outputs) != len(prompts):
        raise RecordError(f"{len(outputs)} responses for {len(prompts)} sequences that were to be scored.")
    largest = max(token for ids in prompts for token in ids)
    rows = [
        token_scores(output, ids, row, largest) for row, (output, ids) in enumerate(zip(outputs, prompts, strict=True))
    ]
    return torch.tensor(rows, dtype=torch.float64)


def decode_tokens(transport: Transport, token_ids: Sequence[Sequence[int]], count: int) -> Decoded:
    """Decode the likeliest tokens after prompts with the engine's current weights; log-probabilities are at temperature 1.

    Tokens are not drawn, because a draw would change the engine's random numbers for other requests. An end token does not end
    the decoding.

    Args:
        transport: The engine.
        token_ids: N prompts of the same length P.
        count: Number of tokens that are decoded after each prompt.

    Returns:
        Prompts and decoded tokens `[N, P + count]`, and log-probabilities `[N, count]`, float64, of the decoded tokens; a row
        is NaN where the engine's are not all finite.

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


def token_scores(output: dict[str, object], ids: list[int], row: int, largest: int) -> list[float]:
    """Read the log-probabilities of one sequence from its response.

    Args:
        output: The response to a request for a prompt's log-probabilities.
        ids: The sequence.
        row: The sequence's place in the batch, for errors.
        largest: The largest token id of the batch.

    Returns:
        Log-probabilities of tokens 1..T-1; NaN where the engine's is not finite.

    Raises:
        RecordError: The response is not the score of its sequence.
    """
    meta = output.get("meta_info")
    entries = meta.get("input_token_logprobs") if isinstance(meta, dict) else None
    if not isinstance(entries, (list, tuple)) or len(entries) != len(ids):
        raise RecordError(
            f"sequence {row}, {FIELD}: found {brief(entries)}; allowed: {len(ids)} entries, one per token."
        )
    scores = []
    for position, (entry, token) in enumerate(zip(entries[1:], ids[1:], strict=True), start=1):
        # SGLang writes 0 instead of the vocabulary's last id, which can only be the batch's largest; the log-probability is
        # still that of the token.
        named = entry[1] if isinstance(entry, (list, tuple)) and len(entry) >= 2 else None
        if not is_integer(named) or not (named == token or (named == 0 and token == largest)):
            raise RecordError(
                f"sequence {row}, {FIELD}[{position}]: found {brief(entry)}; allowed: the score of token {token}."
            )
        # Over HTTP a value that is not finite arrives as null. It becomes NaN here, and the weight check judges it.
        value = number(entry[0])
        if value is not None and value > TOLERANCE:
            raise RecordError(
                f"sequence {row}, {FIELD}[{position}]: found {brief(entry[0])}; allowed: a log-probability <= 0."
            )
        scores.append(float("nan") if value is None else value)
    return scores
