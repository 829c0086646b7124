"""Turn what vLLM's `LLM.generate` returned into rollout records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mismatch_ext.adapters.vllm.heads import head_of, is_flat
from mismatch_ext.adapters.vllm.routing import to_traces

from mismatch_ext import rollout
from mismatch_ext.bad_rows import BadRows, Fault
from mismatch_ext.centering import TokenHead
from mismatch_ext.errors import EngineError, RecordError
from mismatch_ext.rollout import Provenance, RolloutRecord
from mismatch_ext.routing import RoutingShape, RoutingTrace

if TYPE_CHECKING:
    from vllm import RequestOutput


def to_records(
    outputs: Sequence[RequestOutput],
    *,
    prompt_ids: Sequence[Sequence[int]],
    provenance: Provenance,
    shape: RoutingShape | None = None,
    n: int = 1,
    top_k: int = 0,
) -> list[RolloutRecord]:
    """Turn the outputs of a batch of prompts into records, in the order of the prompts.

    Args:
        outputs: What `LLM.generate` returned for requests with `logprobs=0` or more.
        prompt_ids: One list of token ids per prompt.
        provenance: Where the rollouts come from; its weight version is that of the routes too.
        shape: The model's routing shape when the engine records routing; None reads none.
        n: Responses per prompt.
        top_k: How many of its most likely tokens the engine reports at each place; 0 keeps none.

    Raises:
        RecordError: An output is malformed or unfinished, or their number is wrong; names request, field, value and what is
            allowed.
        NonFiniteLogprobError: A log-probability is NaN or infinite.
        RoutingError: Routing is missing or malformed.
        EngineError: A request was aborted.
    """
    responses = sum(len(output.outputs) for output in outputs)
    if n < 1 or len(outputs) != len(prompt_ids) or any(len(output.outputs) != n for output in outputs):
        raise RecordError(
            f"{responses} responses for {len(prompt_ids)} prompts with n={n}; allowed: {n * len(prompt_ids)}, n per prompt."
        )
    completions = list(_completions(outputs, prompt_ids))
    routing: Sequence[RoutingTrace] | None = None
    if shape is not None:
        routing = to_traces(outputs, prompt_ids=prompt_ids, shape=shape, version=provenance.weight_version, n=n)
    heads, faults = _heads(completions, top_k)
    cached = None
    if n == 1:  # of several responses to a prompt, vLLM says only what one of them took from the cache
        cached = [getattr(output, "num_cached_tokens", None) for output in outputs]
    records = rollout.to_records(
        [ids for ids in prompt_ids for _ in range(n)],
        [completion.token_ids for completion in completions],
        [_logprobs(completion, row) for row, completion in enumerate(completions)],
        provenance=provenance,
        routing=routing,
        heads=heads,
        finish_reasons=[completion.finish_reason for completion in completions],
        cached_tokens=cached,
    )
    for row, fault in faults.items():
        records[row] = replace(records[row], fault=records[row].fault or fault)
    return records


def _heads(completions: Sequence[Any], top_k: int) -> tuple[list[TokenHead | None] | None, dict[int, Fault]]:
    """Return the head of each response and the faults of rows that have none; None for all if none are kept.

    Raises RecordError if no row has a head, which is no fault of single rows.
    """
    if not top_k:
        return None, {}
    bad = BadRows(len(completions))
    heads: list[TokenHead | None] = []
    for row, completion in enumerate(completions):
        head = None
        with bad.judging(row, "head"):
            head = head_of(completion.logprobs, top_k)
        heads.append(head)
    if bad.spoil_all:
        raise RecordError(bad.faults[0].message)
    return heads, bad.faults


def _completions(outputs: Sequence[Any], prompt_ids: Sequence[Sequence[int]]) -> Iterator[Any]:
    """Yield the responses, after checking that each has ended."""
    for output, ids in zip(outputs, prompt_ids, strict=True):
        if list(output.prompt_token_ids or ()) != list(ids):
            raise RecordError(
                f"request {output.request_id}: vLLM's output is of another prompt ({len(output.prompt_token_ids or ())} tokens) "
                f"than the one given ({len(ids)} tokens); give prompts in the order of the outputs, as token ids."
            )
        for completion in output.outputs:
            name, reason = f"request {output.request_id}/{completion.index}", completion.finish_reason
            if reason is None:
                raise RecordError(f"{name}: finish_reason is None; allowed: that of a finished request.")
            if reason not in ("stop", "length"):
                raise EngineError(f"{name}: vLLM ended it with finish_reason {reason!r}; sample the prompt again.")
            yield completion


def _logprobs(completion: Any, row: int) -> list[float]:
    ids, tops = completion.token_ids, completion.logprobs
    if tops is None or len(tops) != len(ids):
        count = "none" if tops is None else len(tops)
        raise RecordError(
            f"rollout {row}: {len(ids)} response tokens and {count} log-probabilities; allowed: one for each. Send "
            "SamplingParams(logprobs=0)."
        )
    if is_flat(tops):  # the sampled token is the first of its place
        return [tops.logprobs[first] for first in tops.start_indices]
    return [top[token].logprob for token, top in zip(ids, tops, strict=True)]
