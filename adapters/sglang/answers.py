"""Answers of SGLang's `/generate` and `Engine.generate` as rollout records, with every field checked once.

The log-probabilities of a response are log_softmax(logits / T) before top-p, top-k and min-p. Over HTTP a NaN or infinite value
arrives as null. Routes (SGLang 0.5.12 to 0.5.23) are int32, little-endian, C order `[R, L, K]` in base64, without shape or
dtype: R rows, one per token but the last, L decoder layers, of which dense ones have rows of zeros, and K experts per token.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any

import numpy as np
from mismatch_ext.adapters.http import brief
from numpy.typing import NDArray

from mismatch_ext.bad_rows import BadRows
from mismatch_ext.errors import EngineError, NonFiniteLogprobError, RecordError, RoutingError
from mismatch_ext.rollout import Provenance, RolloutRecord, expect_no_fault, record_of
from mismatch_ext.routing import RoutingShape, RoutingTrace

ROUTES_FLAG = "--enable-return-routed-experts"
MAX_TOKEN_ID = 2**31 - 1
LOWEST = (-65504.0, -3.3e38)
"""Values that SGLang writes for minus infinity: the lowest of float16, and a bound just above the lowest of bfloat16 and
float32."""
TOLERANCE = 1e-3
"""Largest value in nats that a log-probability may have after rounding."""


def to_records(
    outputs: Sequence[Any],
    *,
    prompt_ids: Sequence[Sequence[int]],
    provenance: Provenance,
    shape: RoutingShape | None = None,
    n: int = 1,
    weight_version: str | None = None,
) -> list[RolloutRecord]:
    """Turn the responses to a batch of prompts into records, in the order of the prompts.

    Args:
        outputs: What SGLang returned: n responses per prompt, the responses of a prompt next to each other.
        prompt_ids: One list of token ids per prompt.
        provenance: Provenance of the rollouts.
        shape: The model's routing shape if routing was requested; None reads no routes.
        n: Responses per prompt.
        weight_version: Weight version that every response must report; None accepts any.

    Returns:
        The records. One has a `fault` if its log-probabilities are not finite, its routes or tokens are wrong, or it is of other
        weights.

    Raises:
        RecordError: A response is malformed, their number is wrong, or all are of other weights; names request, field, value and
            what is allowed.
        RoutingError: The routing of all responses is missing or malformed.
        EngineError: A request was aborted.
    """
    if len(outputs) != n * len(prompt_ids):
        raise RecordError(
            f"{len(outputs)} responses for {len(prompt_ids)} prompts with n={n}; allowed: {n * len(prompt_ids)}, n per prompt."
        )
    records = [
        _record(
            output,
            prompt_ids=prompt_ids[row // n],
            provenance=provenance,
            shape=shape,
            weight_version=weight_version,
            request_id=str(row),
        )
        for row, output in enumerate(outputs)
    ]
    for reason in ("routes", "weight_version"):
        if all(record.fault is not None and record.fault.reason == reason for record in records):
            expect_no_fault(records)  # it is the engine's fault, and not that of some rows
    return records


def parse_response(
    output: Any,
    *,
    prompt_ids: Sequence[int],
    provenance: Provenance,
    shape: RoutingShape | None = None,
    weight_version: str | None = None,
    request_id: str | None = None,
    allow_abort: bool = False,
) -> RolloutRecord:
    """Turn one finished response into a record.

    Args:
        output: The response: `output_ids` and `meta_info`.
        prompt_ids: Token ids of its prompt.
        provenance: Provenance of the rollout; the routes get its weight version too.
        shape: The model's routing shape if routing was requested; None reads no routes.
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
    record = _record(
        output,
        prompt_ids=prompt_ids,
        provenance=provenance,
        shape=shape,
        weight_version=weight_version,
        request_id=request_id,
        allow_abort=allow_abort,
    )
    expect_no_fault([record])
    return record


def _record(
    output: Any,
    *,
    prompt_ids: Sequence[int],
    provenance: Provenance,
    shape: RoutingShape | None,
    weight_version: str | None,
    request_id: str | None,
    allow_abort: bool = False,
) -> RolloutRecord:
    """Turn one finished response into a record, with a fault if its tokens, weights, log-probabilities or routes are wrong."""
    answer = _Answer(output, request_id)
    answer.check_counts(len(prompt_ids))
    logprobs, tokens = answer.entries()
    bad = BadRows(1)
    with bad.judging(0, "tokens"):
        answer.check_tokens(tokens)
    with bad.judging(0, "weight_version"):
        answer.check_weights(weight_version)
    with bad.judging(0, "rollout_logprobs"):
        answer.check_finite(logprobs)
    trace = None
    if shape is not None:
        with bad.judging(0, "routes"):
            trace = answer.trace(prompt_ids, shape, provenance.weight_version)
    record = record_of(
        prompt_ids=prompt_ids,
        response_ids=answer.ids,
        rollout_logprobs=logprobs,
        response_mask=np.ones(len(answer.ids), dtype=np.bool_),
        finish_reason=answer.finish_reason(allow_abort),
        provenance=provenance,
        request_id=answer.request,
        routing=trace,
    )
    # The words of this file name the field of the answer.
    return replace(record, fault=bad.faults.get(0, record.fault))


def parse_sampled(output: Any, prompt_tokens: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return the sampled token ids of a response and their log-probabilities, checked as by `parse_response`."""
    answer = _Answer(output, None)
    answer.finish_reason(allow_abort=False)
    answer.check_counts(prompt_tokens)
    return answer.ids, answer.logprobs()


def to_traces(
    outputs: Sequence[Any], *, prompt_ids: Sequence[Sequence[int]], shape: RoutingShape, version: int
) -> list[RoutingTrace]:
    """Turn the routes of a batch's responses, one per prompt, into traces; `to_records` puts them into its records."""
    answers = [_Answer(output, str(row)) for row, output in enumerate(outputs)]
    return [answer.trace(prompt, shape, version) for answer, prompt in zip(answers, prompt_ids, strict=True)]


class _Answer:
    """One response of SGLang, its token ids checked."""

    def __init__(self, output: Any, request: str | None) -> None:
        meta = output.get("meta_info") if isinstance(output, Mapping) else None
        if not isinstance(meta, Mapping):
            if isinstance(output, Mapping) and output.get("error") is not None:
                raise EngineError(f"request {request or '?'}: SGLang answered with the error {brief(output['error'])}.")
            raise RecordError(
                f"request {request or '?'}, response: found {brief(output)}; allowed: one with meta_info."
            )
        self.meta, self.request = meta, request or str(meta.get("id", "?"))[:80]
        ids = output.get("output_ids")
        if not isinstance(ids, (list, tuple)) or not all(is_token_id(token) for token in ids):
            raise self._refused("output_ids", ids, f"a list of token ids from 0 to {MAX_TOKEN_ID}", where="")
        self.ids = tuple(ids)

    def _refused(self, field: str, value: object, allowed: str, *, where: str = "meta_info.") -> RecordError:
        return RecordError(f"request {self.request}, {where}{field}: found {brief(value)}; allowed: {allowed}.")

    def finish_reason(self, allow_abort: bool) -> str:
        """Return "stop", "length" or "abort"; SGLang sends an object with a type, and its OpenAI routes send only the type."""
        reason = self.meta.get("finish_reason")
        kind = reason.get("type") if isinstance(reason, Mapping) else reason
        if kind not in ("stop", "length", "abort"):
            allowed = "that of a finished request: 'stop', 'length' or 'abort'; of a stream, give the last chunk"
            raise self._refused("finish_reason", reason, allowed)
        if kind == "abort" and not allow_abort:
            raise EngineError(
                f"request {self.request}, meta_info.finish_reason: SGLang aborted it ({brief(reason)}); sample the prompt again, "
                "or keep what it had sampled with allow_abort=True."
            )
        return str(kind)

    def check_counts(self, prompt_tokens: int) -> None:
        """Compare the server's counts of tokens, where it sent them, with the prompt and the response."""
        why = "the number of output_ids; of a stream of --incremental-streaming-output, join the chunks"
        for field, length, meaning in (
            ("prompt_tokens", prompt_tokens, "the length of the prompt that was sent; the server saw another one"),
            ("completion_tokens", len(self.ids), why),
            ("output_token_logprobs_length", len(self.ids), why),
        ):
            if self.meta.get(field, length) != length:
                raise self._refused(field, self.meta[field], f"{length}, {meaning}")

    def check_weights(self, expected: str | None) -> None:
        """Refuse a response that was sampled with several versions of the weights, or with another version than `expected`."""
        stamp, spans = self.meta.get("weight_version"), self.meta.get("weight_versions")  # spans since 0.5.23
        if spans:
            versions = [span.get("version") if isinstance(span, Mapping) else span for span in spans]
            if len(set(versions)) > 1:
                raise self._refused(
                    "weight_versions",
                    spans,
                    "one version: weights were updated while it was sampled, so its log-probabilities and routes are of several "
                    "policies; drain the server before an update",
                )
            stamp = versions[0]
        if expected is not None and stamp != expected:
            allowed = f"{expected!r}, the stamp of the last weight update; it was sampled with other weights"
            raise self._refused("weight_version", stamp, allowed)

    def logprobs(self) -> tuple[float, ...]:
        """Return the log-probability of each sampled token, all of them finite."""
        values, tokens = self.entries()
        self.check_tokens(tokens)
        self.check_finite(values)
        return values

    def entries(self) -> tuple[tuple[float, ...], tuple[Any, ...]]:
        """Return log-probabilities and token ids from entries [log-probability, token id, text or null]; NaN for null."""
        field, entries = "output_token_logprobs", self.meta.get("output_token_logprobs")
        if entries is None and self.ids:
            raise self._refused(field, entries, "one entry per token; send return_logprob=true with the request")
        entries = entries or ()
        if len(entries) != len(self.ids):
            raise self._refused(
                field, entries, f"{len(self.ids)} entries, one per token of output_ids, not {len(entries)}"
            )
        # All at once, which is several times faster: verl's server parses every answer in the process that hands tokens on.
        try:
            values = tuple(float("nan") if entry[0] is None else float(entry[0]) for entry in entries)
            tokens = tuple(entry[1] for entry in entries)
        except (TypeError, ValueError, IndexError, KeyError) as error:
            raise self._refused(field, entries, "[log-probability, token id, text or null] for each token") from error
        return values, tokens

    def check_tokens(self, tokens: tuple[Any, ...]) -> None:
        """Refuse entries of other tokens than those that were sampled."""
        if tokens != self.ids:
            place = next(i for i, (token, sampled) in enumerate(zip(tokens, self.ids, strict=True)) if token != sampled)
            raise self._refused(
                f"output_token_logprobs[{place}]",
                self.meta["output_token_logprobs"][place],
                f"the entry of token {self.ids[place]}, as in output_ids",
            )

    def check_finite(self, values: tuple[float, ...]) -> None:
        """Refuse log-probabilities that are not finite, or above 0."""
        if all(LOWEST[0] < value <= 0 for value in values):  # false for NaN
            return
        for place, value in enumerate(values):
            entry = self.meta["output_token_logprobs"][place]
            self._check_logprob(f"output_token_logprobs[{place}]", value, entry)

    def _check_logprob(self, field: str, value: float, entry: Any) -> None:
        if not math.isfinite(value) or value == LOWEST[0] or value <= LOWEST[1]:
            raise NonFiniteLogprobError(
                f"request {self.request}, meta_info.{field}: found {brief(entry)}; allowed: a finite log-probability. SGLang "
                "writes NaN and infinity as null, and clamps minus infinity to its dtype's lowest value: its logits overflowed "
                "or its weights are broken. In float16, check the checkpoint with `mismatch-ext readiness`."
            )
        if value > TOLERANCE:
            raise self._refused(field, entry, "a log-probability <= 0")

    def trace(self, prompt_ids: Sequence[int], shape: RoutingShape, version: int) -> RoutingTrace:
        """Return the routes of prompt and response."""
        tokens = (*prompt_ids, *self.ids)
        experts = decode_routes(
            self.meta.get("routed_experts"), rows=max(len(tokens) - 1, 0), shape=shape, request=self.request
        )
        return RoutingTrace.ingest(
            experts,
            num_experts=shape.num_experts,
            layers=shape.layers,
            tokens=len(tokens),
            version=version,
            request=self.request,
            top_k=shape.top_k,
            last_row=False,
        ).of_tokens(tokens)


def decode_routes(value: Any, *, rows: int, shape: RoutingShape, request: str) -> NDArray[Any]:
    """Return the expert ids `[R, L, K]` of a response's `routed_experts`.

    Args:
        value: The field as the server sent it.
        rows: Number of rows that there must be.
        shape: The model's routing shape.
        request: Name of the request, for messages.

    Raises:
        RoutingError: The field is missing, is not base64, or has another length.
    """
    where = f"request {request}, meta_info.routed_experts"
    if value is None:
        raise RoutingError(
            f"{where}: missing, so its routing is unknown; start the server with {ROUTES_FLAG} (without it SGLang ignores "
            "return_routed_experts of the request), and of a stream give the last chunk."
        )
    try:
        raw = base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError, TypeError) as error:
        raise RoutingError(
            f"{where}: found {brief(value)}; allowed: base64 text; it was altered on its way."
        ) from error
    row_bytes = shape.num_layers * shape.top_k * 4
    if len(raw) != rows * row_bytes:
        raise RoutingError(
            f"{where}: {len(raw)} bytes, {len(raw) / row_bytes:g} rows; allowed: {rows * row_bytes} ({rows} rows) of "
            f"{shape.num_layers} layers x {shape.top_k} experts x 4 bytes. The server ran another model, another prompt, or a "
            "version that counts or encodes rows otherwise."
        )
    return np.frombuffer(raw, dtype="<i4").reshape(rows, shape.num_layers, shape.top_k)


def token_scores(output: Any, ids: Sequence[int], row: int, largest: int) -> list[float]:
    """Read the log-probabilities of a sequence that was sent as a prompt.

    Args:
        output: The response to a request for a prompt's log-probabilities.
        ids: The sequence.
        row: The sequence's place in the batch, for errors.
        largest: The largest token id of the batch.

    Returns:
        Log-probabilities of tokens 1 to T-1; NaN where the engine's is not finite, which the weight check judges.

    Raises:
        RecordError: The response is not the score of its sequence.
    """
    field, meta = "meta_info.input_token_logprobs", output.get("meta_info")
    entries = meta.get("input_token_logprobs") if isinstance(meta, Mapping) else None
    if not isinstance(entries, (list, tuple)) or len(entries) != len(ids):
        raise RecordError(
            f"sequence {row}, {field}: found {brief(entries)}; allowed: {len(ids)} entries, one per token."
        )
    scores = []
    for position, (entry, token) in enumerate(zip(entries[1:], ids[1:], strict=True), start=1):
        value, named = entry[:2] if isinstance(entry, (list, tuple)) and len(entry) >= 2 else (None, None)
        # SGLang writes 0 instead of the vocabulary's last id, which can only be the batch's largest.
        if named != token and not (named == 0 and token == largest):
            raise RecordError(
                f"sequence {row}, {field}[{position}]: found {brief(entry)}; allowed: the score of token {token}."
            )
        if isinstance(value, (int, float)) and value > TOLERANCE:
            raise RecordError(
                f"sequence {row}, {field}[{position}]: found {brief(value)}; allowed: a log-probability <= 0."
            )
        scores.append(float(value) if isinstance(value, (int, float)) else float("nan"))
    return scores


def is_token_id(value: object) -> bool:
    """Tell whether a value is an integer that can be a token id."""
    return isinstance(value, Integral) and not isinstance(value, bool) and 0 <= int(value) <= MAX_TOKEN_ID
