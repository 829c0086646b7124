"""Rollouts of vLLM as rollout records."""

from __future__ import annotations

from collections.abc import Sequence

from mismatch_ext.records import Provenance, RolloutRecord


def to_records(
    prompt_ids: Sequence[Sequence[int]],
    response_ids: Sequence[Sequence[int]],
    rollout_logprobs: Sequence[Sequence[float]],
    provenance: Provenance,
) -> list[RolloutRecord]:
    """Turn token ids and sampled-token log-probabilities into records.

    Args:
        prompt_ids: One list of token ids per rollout.
        response_ids: One list of sampled token ids per rollout.
        rollout_logprobs: Natural-log probability of each sampled token, as the engine reported it.
        provenance: Where the rollouts come from.

    Raises:
        RecordError: Lengths differ, or a log-probability is missing or not finite; names rollout and token.
    """
    return [
        RolloutRecord(
            prompt_ids=tuple(prompt),
            response_ids=tuple(response),
            rollout_logprobs=tuple(float("nan") if value is None else float(value) for value in logprobs),
            response_mask=(True,) * len(response),
            finish_reason=None,
            provenance=provenance,
            request_id=str(row),
        )
        for row, (prompt, response, logprobs) in enumerate(zip(prompt_ids, response_ids, rollout_logprobs, strict=True))
    ]
