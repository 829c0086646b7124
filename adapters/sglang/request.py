"""Requests for SGLang: one dict is both the body of `POST /generate` and the keyword arguments of `Engine.generate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mismatch_ext.errors import RecordError
from mismatch_ext.rollout import SamplingSettings

GREEDY_BELOW = 1e-6
NEUTRAL: dict[str, Any] = {
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "min_new_tokens": 0,
    "stop": None,
    "stop_regex": None,
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "structural_tag": None,
    "logit_bias": None,
    "custom_params": None,
}
"""Values that switch a setting off; they are sent because the server's `--preferred-sampling-params` fill in missing settings."""


def generate_request(
    input_ids: Sequence[int] | Sequence[Sequence[int]],
    sampling: SamplingSettings,
    *,
    max_new_tokens: int,
    routing: bool = False,
    prompt_logprobs: bool = False,
    stop_token_ids: Sequence[int] = (),
    ignore_eos: bool = False,
    n: int = 1,
) -> dict[str, Any]:
    """Build a request, and refuse one whose answer could not be compared with the trainer.

    Args:
        input_ids: Token ids of a prompt, or of several.
        sampling: Settings to sample with; all of them are sent, so that no default of the server applies.
        max_new_tokens: Largest number of tokens to sample; 0 only scores the prompt.
        routing: Ask for the experts of every token except the last; needs a server with `--enable-return-routed-experts`.
        prompt_logprobs: Ask for the prompt's log-probabilities too; they are at temperature 1, whatever the sampling temperature.
            SGLang then computes the prompt again, without the prefix cache.
        stop_token_ids: Tokens that end a response, in addition to the model's own end tokens.
        ignore_eos: Go on after the model's own end token; SGLang then ignores every other end token too.
        n: Responses per prompt. A server with `--enable-deterministic-inference` returns the same response n times.

    Raises:
        RecordError: SGLang would refuse the settings, or understand them in another way.
    """
    if sampling.temperature < GREEDY_BELOW:
        raise RecordError(
            f"sampling temperature={sampling.temperature}: SGLang samples greedily below {GREEDY_BELOW} and reports "
            f"log-probabilities at temperature 1; allowed: >= {GREEDY_BELOW}."
        )
    if sampling.top_k == 1 and sampling.temperature != 1:
        raise RecordError(
            f"sampling top_k=1 with temperature={sampling.temperature}: SGLang reports log-probabilities at temperature 1 or at "
            "the request's, depending on what else is in its batch; allowed: top_k=1 with temperature 1."
        )
    if ignore_eos and stop_token_ids:
        raise RecordError(
            f"ignore_eos=True with stop_token_ids={list(stop_token_ids)}: SGLang then ignores both; leave out one of the two."
        )
    top_k = sampling.top_k if sampling.top_k > 0 else -1
    chosen = {
        "temperature": float(sampling.temperature),
        "top_p": float(sampling.top_p),
        "top_k": top_k,
        "min_p": float(sampling.min_p),
        "repetition_penalty": float(sampling.repetition_penalty),
    }
    limits = {
        "max_new_tokens": max_new_tokens,
        "ignore_eos": ignore_eos,
        "n": n,
        "stop_token_ids": list(stop_token_ids),
        "sampling_seed": None,
    }
    request: dict[str, Any] = {
        "input_ids": [list(prompt) if isinstance(prompt, Sequence) else int(prompt) for prompt in input_ids],
        "sampling_params": NEUTRAL | chosen | limits,
        "return_logprob": True,
    }
    if prompt_logprobs:
        request["logprob_start_len"] = 0
    if routing:
        request["return_routed_experts"] = True
    return request
