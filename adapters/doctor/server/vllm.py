"""The doctor's requests to a stock vLLM server over `POST /v1/completions`, and how it reads the answers."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from mismatch_ext.adapters.doctor.asking import ToSample, sequences
from mismatch_ext.adapters.doctor.server.engine import ServedEngine, whole
from mismatch_ext.adapters.http import brief
from mismatch_ext.adapters.vllm.remote import PREFILL

from mismatch_ext.doctor import Sample
from mismatch_ext.errors import ConfigError, EngineError, RecordError

PATH = "/v1/completions"
# Number of sequences in one scoring request.
SCORED_AT_ONCE = 16
# vLLM's server sends this for minus infinity.
LOWEST = -9999.0
# First release whose answers have token ids.
SINCE = "0.10.2"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One response.

    Args:
        tokens: The response's token ids.
        logprobs: Log-probabilities of these tokens, in nats; empty if none were asked for.
        prompt_logprobs: Log-probabilities of the prompt's tokens from the second on, in nats; empty if none were asked for.
        routes: Expert ids `[prompt + response - 1, L, K]`; None if the server sent none.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    prompt_logprobs: tuple[float, ...]
    routes: Any = None


class VllmServer(ServedEngine):
    """A stock vLLM server."""

    def sample(self, asked: ToSample) -> Sample:
        """Sample with one request per prompt, several at once."""
        n, given = asked.of_each, asked.given

        def ask_prompt(index: int) -> list[Choice]:
            body = {"prompt": given[index], "n": n, "max_tokens": asked.max_tokens, "logprobs": 0, **asked.sampling}
            if body.get("seed") is not None:
                # vLLM draws response i of a request with seed + i.
                body["seed"] += index * n
            return read(self._post(body), [given[index]], n)

        answers = self.server.client.each(ask_prompt, range(len(given)), "sampling")
        rows = [
            (tuple(prompt), choice)
            for prompt, choices in zip(asked.prompts, answers, strict=True)
            for choice in choices
            if choice.tokens
        ]
        # If the server saw other prompts than the trainer, the rows of its routes do not fit the trainer's tokens.
        traced = [self._trace([*prompt, *c.tokens], c.routes, row, last_row=False) for row, (prompt, c) in enumerate(rows)
                  if asked.seen is None]  # fmt: skip
        return Sample(
            prompts=tuple(prompt for prompt, _ in rows),
            responses=tuple(choice.tokens for _, choice in rows),
            masks=tuple((True,) * len(choice.tokens) for _, choice in rows),
            logprobs=tuple(choice.logprobs for _, choice in rows),
            routes=whole(traced),
        )

    def score(self, sample: Sample) -> Sample:
        """Score with requests of several sequences each."""
        rows = sequences(sample)
        batches = [rows[at : at + SCORED_AT_ONCE] for at in range(0, len(rows), SCORED_AT_ONCE)]

        def ask_batch(batch: list[list[int]]) -> list[Choice]:
            # vLLM has to sample one token. The server's default settings change only this token, not the prompt's scores.
            return read(self._post({"prompt": batch, **PREFILL}), batch, 1)

        scored = [choice for batch in self.server.client.each(ask_batch, batches, "scoring") for choice in batch]
        logprobs = tuple(
            choice.prompt_logprobs[len(prompt) - 1 :] for choice, prompt in zip(scored, sample.prompts, strict=True)
        )
        traced = [
            self._trace(ids, c.routes, row, last_row=True)
            for row, (ids, c) in enumerate(zip(rows, scored, strict=True))
        ]
        return replace(sample, logprobs=logprobs, routes=whole(traced))

    def _post(self, body: Mapping[str, Any]) -> Any:
        asked = {"model": self.server.name, "return_token_ids": True, **body}
        try:
            return self.server.client.post(PATH, asked)
        except ConfigError as error:
            raise ConfigError(f"{error}{advice(str(error))}") from error


def advice(refusal: str) -> str:
    """Return what to do about a request that vLLM refused."""
    if "out of vocabulary" in refusal:
        return "; the server's model has a smaller vocabulary than the tokens of --prompts: is it the model of --model?"
    if "maximum context length" in refusal:
        return "; give a smaller --max-tokens, or shorter prompts"
    return "; the server's log says more"


def read(answer: Any, prompts: Sequence[Sequence[int]], n: int) -> list[Choice]:
    """Read an answer of `/v1/completions`.

    Args:
        answer: The parsed answer.
        prompts: Token ids of each prompt of the request.
        n: Responses per prompt.

    Returns:
        The responses, n per prompt; the responses of a prompt are next to each other.

    Raises:
        EngineError: A response is unfinished.
        RecordError: The answer is malformed, or belongs to other prompts.
    """
    choices = answer.get("choices") if isinstance(answer, dict) else None
    wanted = n * len(prompts)
    if not isinstance(choices, list) or len(choices) != wanted or not all(isinstance(c, dict) for c in choices):
        raise RecordError(f"--server: choices is {brief(choices)}; allowed: {wanted} responses.")
    ordered = sorted(choices, key=lambda choice: choice.get("index", 0))
    return [_choice(choice, list(prompts[place // n]), place) for place, choice in enumerate(ordered)]


def _choice(choice: Mapping[str, Any], prompt: list[int], place: int) -> Choice:
    where, tokens, seen = f"--server: choices[{place}]", choice.get("token_ids"), choice.get("prompt_token_ids")
    if choice.get("finish_reason") not in ("stop", "length"):
        raise EngineError(
            f"{where} ended with finish_reason {brief(choice.get('finish_reason'))}; allowed: stop, length. Does a trainer use "
            "the server, too, and abort its requests? Ask it between two steps."
        )
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise RecordError(
            f"{where}.token_ids is {brief(tokens)}; allowed: a list of ids, which vLLM sends since {SINCE}: is the server older?"
        )
    if seen is not None and seen != prompt:
        raise RecordError(
            f"{where}: the server saw a prompt of {len(seen)} tokens instead of the {len(prompt)} that it was sent: something "
            "before it changes prompts."
        )
    return Choice(
        tokens=tuple(tokens),
        logprobs=_logprobs(choice, len(tokens), where),
        prompt_logprobs=_of_prompt(choice.get("prompt_logprobs"), prompt, where),
        routes=_routes(choice.get("routed_experts"), where),
    )


def _logprobs(choice: Mapping[str, Any], tokens: int, where: str) -> tuple[float, ...]:
    held = choice.get("logprobs")
    if held is None:
        return ()
    values = held.get("token_logprobs") if isinstance(held, dict) else None
    if not isinstance(values, list) or len(values) != tokens:
        raise RecordError(
            f"{where}.logprobs.token_logprobs is {brief(values)}; allowed: one for each of {tokens} tokens."
        )
    return tuple(_finite(value) for value in values)


def _of_prompt(entries: Any, prompt: list[int], where: str) -> tuple[float, ...]:
    if entries is None:
        return ()
    if not isinstance(entries, list) or len(entries) != len(prompt):
        raise RecordError(
            f"{where}.prompt_logprobs is {brief(entries)}; allowed: one for each of {len(prompt)} tokens."
        )
    logprobs = []
    for place, (entry, token) in enumerate(zip(entries[1:], prompt[1:], strict=True), start=1):
        held = entry.get(str(token)) if isinstance(entry, dict) else None
        if not isinstance(held, dict):
            raise RecordError(
                f"{where}.prompt_logprobs[{place}] is {brief(entry)}; allowed: the score of token {token}."
            )
        logprobs.append(_finite(held.get("logprob")))
    return tuple(logprobs)


def _finite(value: Any) -> float:
    """Return a log-probability, or NaN if the value is missing or minus infinity; a `Sample` reports the place of a NaN."""
    return float(value) if isinstance(value, (int, float)) and value > LOWEST else float("nan")


def _routes(value: Any, where: str) -> Any:
    """Return expert ids `[rows, L, K]` from the base64 text of a .npy file."""
    if value is None:
        return None
    try:
        return np.load(io.BytesIO(base64.b64decode(value, validate=True)), allow_pickle=False)
    except (binascii.Error, ValueError, TypeError, EOFError) as error:
        raise RecordError(f"{where}.routed_experts is {brief(value)}; allowed: a .npy file in base64.") from error
