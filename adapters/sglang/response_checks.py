"""Checks of a response's `meta_info`, each with its own message; other modules read its log-probabilities and routes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mismatch_ext.adapters.sglang.fields import brief, count, mapping, refuse, sequence

from mismatch_ext.errors import EngineError

SPANS = "meta_info.weight_versions"


def finish_reason(meta: Mapping[Any, Any], request: str, allow_abort: bool) -> str:
    """Return "stop", "length" or "abort"; SGLang sends an object with a type, and its OpenAI routes send only the type.

    Raises:
        RecordError: The request has not finished, or the field is malformed.
        EngineError: The request was aborted and that is not allowed.
    """
    field, found = "meta_info.finish_reason", meta.get("finish_reason")
    kind = found.get("type") if isinstance(found, Mapping) else found
    if found is None:
        raise refuse(request, field, found, "that of a finished request; of a stream, give the last chunk")
    if not isinstance(kind, str) or kind not in ("stop", "length", "abort"):
        raise refuse(request, field, found, "an object whose type is 'stop', 'length' or 'abort'")
    if kind == "abort" and not allow_abort:
        raise EngineError(
            f"request {request}, {field}: SGLang aborted it ({brief(found)}); sample the prompt again, or keep what it had "
            "sampled with allow_abort=True."
        )
    return kind


def check_counts(meta: Mapping[Any, Any], prompt: int, response: int, request: str) -> None:
    """Check the server's counts of tokens, where it sent them, against the prompt and the response."""
    for field, length, why in (
        ("prompt_tokens", prompt, "the length of the prompt that was sent; the server saw another one"),
        (
            "completion_tokens",
            response,
            "the number of output_ids; of a stream of --incremental-streaming-output, join the chunks or leave out the flag",
        ),
        ("output_token_logprobs_length", response, "the number of output_ids"),
    ):
        if field in meta and count(meta[field], request, f"meta_info.{field}") != length:
            raise refuse(request, f"meta_info.{field}", meta[field], f"{length}, {why}")


def check_prompt_logprobs(meta: Mapping[Any, Any], temperature: float, request: str) -> None:
    """Refuse a prompt's log-probabilities, which are at temperature 1, if the response's temperature is another one."""
    field, found = "meta_info.input_token_logprobs", meta.get("input_token_logprobs")
    if found is not None and len(sequence(found, request, field)) and temperature != 1:
        raise refuse(
            request,
            field,
            found,
            f"none at temperature {temperature}: SGLang's are those of temperature 1 and do not compare with the response's; "
            "leave logprob_start_len out of the request, and score with a request of temperature 1",
        )


def check_weights(meta: Mapping[Any, Any], expected: str | None, request: str) -> None:
    """Refuse a response that was sampled with several versions of the weights, or with another version than `expected`."""
    field, found = "meta_info.weight_version", meta.get("weight_version")
    if found is not None and not isinstance(found, str):
        raise refuse(request, field, found, "text")
    stamps = _span_versions(meta, request)
    if len(set(stamps)) > 1:
        raise refuse(
            request,
            SPANS,
            meta["weight_versions"],
            "one version: weights were updated while it was sampled, so its log-probabilities and routes are of several "
            "policies; drain the server before an update",
        )
    if stamps and found is not None and found != stamps[0]:
        raise refuse(request, field, found, f"{brief(stamps[0])}, as in weight_versions")
    stamp = stamps[0] if stamps else found
    if expected is not None and stamp != expected:
        raise refuse(
            request,
            field,
            stamp,
            f"{brief(expected)}, the stamp of the last weight update; it was sampled with other weights",
        )


def _span_versions(meta: Mapping[Any, Any], request: str) -> list[str]:
    """Return the weight versions that sampled a response; servers before 0.5.23 do not send them, and the list is then empty."""
    spans = meta.get("weight_versions")
    if spans is None:
        return []
    stamps = []
    for index, span in enumerate(sequence(spans, request, SPANS)):
        stamp = mapping(span, request, f"{SPANS}[{index}]").get("version")
        if not isinstance(stamp, str):
            raise refuse(request, f"{SPANS}[{index}].version", stamp, "text")
        stamps.append(stamp)
    return stamps
