"""Requests for SGLang: one dict is both the body of `POST /generate` and the keyword arguments of `Engine.generate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mismatch_ext.adapters.sglang.fields import brief, is_integer, token_ids
from packaging.version import InvalidVersion, Version

from mismatch_ext.errors import PeerVersionError, RecordError, RoutingError
from mismatch_ext.records import SamplingSettings

START_LEN_SINCE = Version("0.5.12")
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
    routed_experts_start: int = 0,
    logprobs: bool = True,
    prompt_logprobs: bool = False,
    stop_token_ids: Sequence[int] = (),
    ignore_eos: bool = False,
    n: int = 1,
    seed: int | Sequence[int] | None = None,
    stream: bool = False,
    request_ids: str | Sequence[str] | None = None,
    version: str | None = None,
) -> dict[str, Any]:
    """Build a request, and refuse one whose answer could not be compared with the trainer.

    Args:
        input_ids: Token ids of a prompt, or of several.
        sampling: Settings to sample with; all of them are sent, so that no default of the server applies.
        max_new_tokens: Largest number of tokens to sample; 0 only scores the prompt.
        routing: Ask for the experts of every token except the last; needs a server with `--enable-return-routed-experts`.
        routed_experts_start: First position whose experts are sent, at most the length of the shortest prompt.
        logprobs: Ask for the log-probability of each sampled token.
        prompt_logprobs: Ask for the prompt's log-probabilities too; they are at temperature 1, whatever the sampling temperature.
            SGLang then computes the prompt anew, without the prefix cache.
        stop_token_ids: Tokens that end a response, in addition to the model's own end tokens.
        ignore_eos: Go on after the model's own end token; SGLang then ignores every other end token too.
        n: Responses per prompt. A server with `--enable-deterministic-inference` returns the same response n times, with or
            without a seed: give it the prompt n times instead, each time with another seed.
        seed: One seed for all prompts, or one per prompt. It has an effect only under `--enable-deterministic-inference`, where
            None means 42 for every request.
        stream: Ask for a stream; its last chunk has the routes.
        request_ids: Names of the requests, one per prompt; None lets the server name them.
        version: The server's version; None assumes one that this release supports.

    Raises:
        RecordError: SGLang would refuse token ids or settings, or understand them in another way.
        RoutingError: The start of the routes is beyond a prompt, or is given without routing.
        PeerVersionError: The server's version ignores the start of the routes.
    """
    prompts, batched = _prompts(input_ids)
    _check_sampling(sampling, prompt_logprobs and logprobs)
    _check_number("max_new_tokens", max_new_tokens, 0)
    _check_number("n", n, 1)
    if prompt_logprobs and not logprobs:
        raise RecordError("prompt_logprobs=True with logprobs=False; allowed: both, for SGLang returns them together.")
    if ignore_eos and stop_token_ids:
        raise RecordError(
            f"ignore_eos=True with stop_token_ids={brief(stop_token_ids)}: SGLang then ignores both; leave out one of the two."
        )
    _check_start(routed_experts_start, routing, prompts, version)
    seeds = _seeds(seed, prompts, n)
    settings: dict[str, Any] = {
        **NEUTRAL,
        "max_new_tokens": int(max_new_tokens),
        "temperature": float(sampling.temperature),
        "top_p": float(sampling.top_p),
        "top_k": int(sampling.top_k) if sampling.top_k > 0 else -1,
        "min_p": float(sampling.min_p),
        "repetition_penalty": float(sampling.repetition_penalty),
        "ignore_eos": bool(ignore_eos),
        "n": int(n),
        "stop_token_ids": list(token_ids(list(stop_token_ids), "to be sent", "stop_token_ids")),
    }
    each = [settings | {"sampling_seed": one} for one in seeds]
    request: dict[str, Any] = {
        "input_ids": prompts if batched else prompts[0],
        "sampling_params": each if batched and len(set(seeds)) > 1 else each[0],
        "return_logprob": bool(logprobs),
    }
    if prompt_logprobs:
        request["logprob_start_len"] = 0
    if routing:
        request["return_routed_experts"] = True
    if routed_experts_start:
        request["routed_experts_start_len"] = int(routed_experts_start)
    if stream:
        request["stream"] = True
    if request_ids is not None:
        request["rid"] = _names(request_ids, len(prompts), batched)
    return request


def _prompts(input_ids: Any) -> tuple[list[list[int]], bool]:
    if isinstance(input_ids, (str, bytes)) or not isinstance(input_ids, Sequence) or not input_ids:
        raise RecordError(f"input_ids is {brief(input_ids)}; allowed: a list of token ids, or a list of such lists.")
    batched = not is_integer(input_ids[0])
    prompts = []
    for row, prompt in enumerate(input_ids if batched else [input_ids]):
        if isinstance(prompt, (str, bytes)) or not isinstance(prompt, Sequence) or not prompt:
            raise RecordError(
                f"input_ids[{row}] is {brief(prompt)}; allowed: a list of at least one token id. Give token ids, not text: the "
                "server's tokenizer need not be the trainer's."
            )
        prompts.append(list(token_ids(list(prompt), "to be sent", f"input_ids[{row}]")))
    return prompts, batched


def _check_sampling(sampling: SamplingSettings, prompt_logprobs: bool) -> None:
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
    if sampling.repetition_penalty > 2:
        raise RecordError(
            f"sampling repetition_penalty={sampling.repetition_penalty} is refused by SGLang; allowed: 0 < x <= 2."
        )
    if prompt_logprobs and sampling.temperature != 1:
        raise RecordError(
            f"prompt_logprobs=True with temperature={sampling.temperature}: SGLang's log-probabilities of a prompt are at "
            "temperature 1 whatever the request's, and do not compare with the response's; score with a request of temperature 1."
        )


def _check_start(start: Any, routing: bool, prompts: Sequence[Sequence[int]], version: str | None) -> None:
    shortest = min(map(len, prompts))
    if not is_integer(start) or not 0 <= int(start) <= shortest:
        raise RoutingError(
            f"routed_experts_start={brief(start)}; allowed: 0 to {shortest}, the length of the shortest prompt."
        )
    if not start:
        return
    if not routing:
        raise RoutingError(f"routed_experts_start={start} with routing=False has no effect; leave out one of the two.")
    if version is not None and _parsed(version) < START_LEN_SINCE:
        raise PeerVersionError(
            f"sglang {version} ignores routed_experts_start_len={start} and returns all rows; leave it out, or run "
            f"{START_LEN_SINCE} or later."
        )


def _parsed(version: str) -> Version:
    try:
        return Version(version)
    except (InvalidVersion, TypeError) as error:
        raise PeerVersionError(
            f"sglang version {brief(version)} is no version; allowed: one such as '0.5.18'."
        ) from error


def _check_number(name: str, value: Any, least: int) -> None:
    if not is_integer(value) or value < least:
        raise RecordError(f"{name}={brief(value)}; allowed: an integer >= {least}.")


def _seeds(seed: Any, prompts: Sequence[Sequence[int]], n: int) -> list[int | None]:
    """Return a seed per prompt; draws depend only on the seed and the position, so equal requests with one seed are refused."""
    if seed is None:
        return [None] * len(prompts)
    seeds = list(seed) if isinstance(seed, (list, tuple)) else [seed] * len(prompts)
    if len(seeds) != len(prompts):
        raise RecordError(f"{len(seeds)} seeds for {len(prompts)} prompts; allowed: one seed, or one per prompt.")
    for one in seeds:
        if not is_integer(one) or not -(2**63) <= int(one) < 2**63:
            raise RecordError(f"seed={brief(one)}; allowed: an integer of 64 bits.")
    way_out = "give the prompt once per sample, each with a seed of its own: input_ids=[p, p], seed=[1, 2]."
    if n > 1:
        raise RecordError(
            f"n={n} with seed={brief(seed)}: SGLang draws the same for all {n} responses of a prompt; {way_out}"
        )
    if len({(one, tuple(prompt)) for one, prompt in zip(seeds, prompts, strict=True)}) < len(prompts):
        raise RecordError(
            f"seed={brief(seed)}: the same prompt twice with one seed gives one response twice; {way_out}"
        )
    return [int(one) for one in seeds]


def _names(names: str | Sequence[str], prompts: int, batched: bool) -> str | list[str]:
    given = [names] if isinstance(names, str) else list(names)
    if len(given) != prompts or len(set(given)) != prompts or not all(isinstance(n, str) and n for n in given):
        raise RecordError(
            f"request_ids={brief(names)} for {prompts} prompts; allowed: one name per prompt, all different."
        )
    return given if batched else given[0]
