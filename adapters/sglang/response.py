"""Responses of SGLang's `/generate` and `Engine.generate`, turned into rollout records.

The log-probabilities of a response are log_softmax(logits / T) before top-p, top-k and min-p; those of a prompt are at T = 1
whatever the request's T. Over HTTP a NaN or infinite value arrives as null.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mismatch_ext.adapters.sglang.fields import (
    brief,
    is_integer,
    mapping,
    number,
    refuse,
    sequence,
    token_ids,
)
from mismatch_ext.adapters.sglang.response_checks import (
    check_counts,
    check_prompt_logprobs,
    check_weights,
    finish_reason,
)
from mismatch_ext.adapters.sglang.routes import to_trace

from mismatch_ext.errors import EngineError, NonFiniteLogprobError, RecordError
from mismatch_ext.records import Provenance, RolloutRecord
from mismatch_ext.routing import RoutingShape, RoutingTrace
from mismatch_ext.routing.shape import starts_of

LOGPROBS = "meta_info.output_token_logprobs"
LOWEST = (-65504.0, -3.3e38)
"""Values that SGLang writes for minus infinity: the lowest of float16, and a bound just above the lowest of bfloat16 and
float32."""
TOLERANCE = 1e-3
"""Largest value in nats that a log-probability may have after rounding."""


def to_records(
    outputs: Any,
    *,
    prompt_ids: Sequence[Sequence[int]],
    provenance: Provenance,
    shape: RoutingShape | None = None,
    routed_experts_start: int | Sequence[int] = 0,
    n: int = 1,
    weight_version: str | None = None,
    allow_abort: bool = False,
) -> list[RolloutRecord]:
    """Turn the responses to a batch of prompts into records, in the order of the prompts.

    Args:
        outputs: The list that SGLang returned: n responses per prompt, the responses of a prompt next to each other. A single
            response may come without a list around it.
        prompt_ids: One list of token ids per prompt.
        provenance: Provenance of the rollouts.
        shape: The model's routing shape if routing was requested; None reads no routes.
        routed_experts_start: The value of the request, one for all or one per prompt.
        n: Responses per prompt.
        weight_version: Weight version that every response must report; None accepts any.
        allow_abort: Keep the tokens that aborted requests had sampled.

    Raises:
        RecordError: A response is malformed, or their number is wrong; names request, field, value and what is allowed.
        RoutingError: Routing is missing or malformed.
        EngineError: A request was aborted.
    """
    starts = starts_of(routed_experts_start, len(prompt_ids))
    return [
        parse_response(
            output,
            prompt_ids=prompt_ids[row // n],
            provenance=provenance,
            shape=shape,
            routed_experts_start=starts[row // n],
            weight_version=weight_version,
            request_id=str(row),
            allow_abort=allow_abort,
        )
        for row, output in enumerate(_responses(outputs, len(prompt_ids), n))
    ]


def to_traces(
    outputs: Any,
    *,
    prompt_ids: Sequence[Sequence[int]],
    shape: RoutingShape,
    version: int,
    routed_experts_start: int | Sequence[int] = 0,
    n: int = 1,
) -> list[RoutingTrace]:
    """Turn the routes of a batch's responses into traces, in the order of the prompts; `to_records` puts them into its records.

    Args:
        outputs: The list that SGLang returned; its requests have finished.
        prompt_ids: One list of token ids per prompt.
        shape: The routing shape of the model that replays.
        version: Weight version that the server sampled with.
        routed_experts_start: The value of the request, one for all or one per prompt.
        n: Responses per prompt.

    Raises:
        RecordError: A response has no tokens, or their number is wrong.
        RoutingError: Routing is missing or malformed; names request, row and layer.
    """
    starts, traces = starts_of(routed_experts_start, len(prompt_ids)), []
    for row, output in enumerate(_responses(outputs, len(prompt_ids), n)):
        fields = mapping(output, str(row), "response")
        meta = mapping(fields.get("meta_info"), str(row), "meta_info")
        ids = token_ids(fields.get("output_ids"), str(row), "output_ids")
        traces.append(_trace(meta, prompt_ids[row // n], ids, shape, starts[row // n], version, str(row)))
    return traces


def _responses(outputs: Any, prompts: int, n: int) -> Sequence[Any]:
    items = [outputs] if isinstance(outputs, Mapping) else sequence(outputs, "of the batch", "response")
    if n < 1 or len(items) != n * prompts:
        raise RecordError(
            f"{len(items)} responses for {prompts} prompts with n={n}; allowed: {n * prompts}, n per prompt."
        )
    return items


def parse_response(
    output: Any,
    *,
    prompt_ids: Sequence[int],
    provenance: Provenance,
    shape: RoutingShape | None = None,
    routed_experts_start: int = 0,
    weight_version: str | None = None,
    request_id: str | None = None,
    allow_abort: bool = False,
) -> RolloutRecord:
    """Turn one finished response into a record, after checking every field that the record is made of.

    Args:
        output: The response: `output_ids` and `meta_info`. For a stream, give the last chunk, which has all tokens and the
            routes.
        prompt_ids: Token ids of its prompt.
        provenance: Provenance of the rollout; the routes get its weight version too.
        shape: The model's routing shape if routing was requested; None reads no routes.
        routed_experts_start: The value of the request. A server that ignored it sent all rows; those before it are cut.
        weight_version: Weight version that the response must report; None accepts any.
        request_id: Name of the request; None takes the server's name for it.
        allow_abort: Keep the tokens that an aborted request had sampled.

    Returns:
        The record. Its last token has no route, because this token never passed through the engine's model.

    Raises:
        RecordError: The response is malformed; names request, field, value and what is allowed.
        NonFiniteLogprobError: A log-probability is null, NaN or infinite.
        RoutingError: Routing is missing or malformed.
        EngineError: The request was aborted.
    """
    fields = mapping(output, request_id or "?", "response")
    if fields.get("error") is not None and fields.get("meta_info") is None:
        raise EngineError(f"request {request_id or '?'}: SGLang answered with the error {brief(fields['error'])}.")
    meta = mapping(fields.get("meta_info"), request_id or "?", "meta_info")
    request = request_id or _name(meta)
    reason = finish_reason(meta, request, allow_abort)
    ids = token_ids(fields.get("output_ids"), request, "output_ids")
    check_counts(meta, len(prompt_ids), len(ids), request)
    check_prompt_logprobs(meta, provenance.sampling.temperature, request)
    check_weights(meta, weight_version, request)
    return RolloutRecord(
        prompt_ids=tuple(prompt_ids),
        response_ids=ids,
        rollout_logprobs=_logprobs(meta, ids, request),
        response_mask=(True,) * len(ids),
        finish_reason=reason,
        provenance=provenance,
        request_id=request,
        routing=None
        if shape is None
        else _trace(meta, prompt_ids, ids, shape, routed_experts_start, provenance.weight_version, request),
    )


def parse_sampled(output: Any, prompt_tokens: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return the sampled token ids of a response and their log-probabilities, without making a record.

    Args:
        output: The response.
        prompt_tokens: Number of tokens of its prompt.

    Raises:
        RecordError: The response is malformed.
        NonFiniteLogprobError: A log-probability is null, NaN or infinite.
        EngineError: The request was aborted.
    """
    fields = mapping(output, "?", "response")
    meta = mapping(fields.get("meta_info"), "?", "meta_info")
    request = _name(meta)
    finish_reason(meta, request, False)
    ids = token_ids(fields.get("output_ids"), request, "output_ids")
    check_counts(meta, prompt_tokens, len(ids), request)
    return ids, _logprobs(meta, ids, request)


def _trace(
    meta: Mapping[Any, Any],
    prompt: Sequence[int],
    response: Sequence[int],
    shape: RoutingShape,
    start: int,
    version: int,
    request: str,
) -> RoutingTrace:
    return to_trace(
        meta.get("routed_experts"),
        prompt_tokens=len(prompt),
        output_tokens=len(response),
        shape=shape,
        start=start,
        version=version,
        request=request,
    ).of_tokens((*prompt, *response))


def _name(meta: Mapping[Any, Any]) -> str:
    name = meta.get("id")
    return name[:80] if isinstance(name, str) and name else "?"


def _logprobs(meta: Mapping[Any, Any], ids: tuple[int, ...], request: str) -> tuple[float, ...]:
    found = meta.get("output_token_logprobs")
    if found is None and ids:
        raise refuse(request, LOGPROBS, found, "one entry per token; send return_logprob=true with the request")
    entries = sequence(found if found is not None else (), request, LOGPROBS)
    if len(entries) != len(ids):
        raise refuse(request, LOGPROBS, entries, f"{len(ids)} entries, one per token of output_ids, not {len(entries)}")
    if (usual := _usual(entries, ids)) is not None:
        return usual
    pairs = enumerate(zip(entries, ids, strict=True))
    return tuple(_logprob(entry, token, position, request) for position, (entry, token) in pairs)


def _usual(entries: Sequence[Any], ids: tuple[int, ...]) -> tuple[float, ...] | None:
    """Return the log-probabilities of entries that are clearly right, checked together, which is several times faster.

    Speed matters because a server of verl's parses every answer in the process that hands tokens on. None means that `_logprob`
    has to check each entry, which then accepts it or says what is wrong.
    """
    if not set(map(type, entries)) <= {list, tuple} or not set(map(len, entries)) <= {2, 3}:
        return None
    values, tokens = tuple(entry[0] for entry in entries), tuple(entry[1] for entry in entries)
    if set(map(type, values)) != {float} or set(map(type, tokens)) != {int} or tokens != ids:
        return None
    # A comparison with NaN is false.
    return values if all(LOWEST[0] < value <= 0 for value in values) else None


def _logprob(entry: Any, token: int, position: int, request: str) -> float:
    """Check an entry (log-probability, token id, text or null) and return its log-probability."""
    field = f"{LOGPROBS}[{position}]"
    if not isinstance(entry, (list, tuple)) or len(entry) not in (2, 3):
        raise refuse(request, field, entry, "[log-probability, token id, text or null]")
    if not is_integer(entry[1]) or entry[1] != token:
        raise refuse(request, f"{field}[1]", entry[1], f"{token}, the token of output_ids[{position}]")
    value = math.nan if entry[0] is None else number(entry[0])
    if value is None:
        raise refuse(request, f"{field}[0]", entry[0], "a number")
    if not math.isfinite(value) or value == LOWEST[0] or value <= LOWEST[1]:
        raise NonFiniteLogprobError(
            f"request {request}, {field}[0]: found {brief(entry[0])} for token id {token}; allowed: a finite log-probability. "
            "SGLang writes NaN and infinity as null, and clamps minus infinity to its dtype's lowest value: its logits "
            "overflowed or its weights are broken. In float16, check the checkpoint with `mismatch-ext readiness`."
        )
    if value > TOLERANCE:
        raise refuse(request, f"{field}[0]", entry[0], "a log-probability <= 0")
    return value
