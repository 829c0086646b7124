"""Rollouts of vLLM as rollout records."""

from __future__ import annotations

from collections.abc import Sequence

from mismatch_ext.records import Provenance, RolloutRecord
from mismatch_ext.routing import RoutingTrace


def to_records(
    prompt_ids: Sequence[Sequence[int]],
    response_ids: Sequence[Sequence[int]],
    rollout_logprobs: Sequence[Sequence[float]],
    provenance: Provenance,
    routing: Sequence[RoutingTrace] | None = None,
) -> list[RolloutRecord]:
    """Turn token ids and sampled-token log-probabilities into records.

    Args:
        prompt_ids: One list of token ids per rollout.
        response_ids: One list of sampled token ids per rollout.
        rollout_logprobs: Natural-log probability of each sampled token, as the engine reported it.
        provenance: Where the rollouts come from.
        routing: One trace per rollout (`to_traces`), or None when the engine did not record any.

    Raises:
        RecordError: Lengths differ, or a log-probability is missing or not finite; names rollout and token.
    """
    traces: Sequence[RoutingTrace | None] = [None] * len(response_ids) if routing is None else routing
    return [
        RolloutRecord(
            prompt_ids=tuple(prompt),
            response_ids=tuple(response),
            rollout_logprobs=tuple(float("nan") if value is None else float(value) for value in logprobs),
            response_mask=(True,) * len(response),
            finish_reason=None,
            provenance=provenance,
            request_id=str(row),
            routing=trace,
        )
        for row, (prompt, response, logprobs, trace) in enumerate(
            zip(prompt_ids, response_ids, rollout_logprobs, traces, strict=True)
        )
    ]
