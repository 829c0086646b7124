"""Completions that TRL joins from several calls of its engine: the calls' records are joined to one for each completion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from mismatch_ext.adapters.transformers.chat import TokenizerChat
from torch import Tensor

from mismatch_ext.bad_rows import BadRows, Fault
from mismatch_ext.chains.in_run import Forks, forks_of_completions
from mismatch_ext.checks import Checks
from mismatch_ext.errors import MismatchError, RecordError, RoutingError
from mismatch_ext.rollout import Provenance, RolloutRecord, to_flags, to_ids
from mismatch_ext.turns import Joined, Matched, Trained, any_asked, match_turns

ROWS = ("sampled_rows", "prefilled_rows", "rerouted_rows")
"""Counts of routes in `Joined`, which are metrics under `routing/`."""


def matched_turns(records: list[RolloutRecord], output: Sequence[Any], *, own: bool, limit: int) -> Matched:
    """Give each completion the records of its turns; `own` if a user's `rollout_func` generated."""
    trained = _trained(output)
    if own and not any_asked(records, trained):
        raise RecordError(
            "a rollout_func returned completions that trainer.vllm_generation.generate has not sampled, whose weights and "
            "log-probabilities are not known; generate with it, not with trainer.vllm_generation.llm or an engine of your own."
        )
    return match_turns(records, trained, limit=None if own else limit)


def forks_of(matched: Matched, tokenizer: Any, checks: Checks) -> Forks:
    """Return how many completions are not what their turns sampled, and why, if the tokenizer has a chat template.

    Causes are a service. If looking for them fails, whatever the reason, the run goes on without them.
    """
    if not getattr(tokenizer, "chat_template", None):
        return forks_of_completions(matched, None)
    try:
        return forks_of_completions(matched, TokenizerChat(tokenizer))
    except Exception as error:  # noqa: BLE001 - a user's tokenizer and template run here
        checks.note("turns", f"no cause of a fork was looked for: {type(error).__name__}: {error}")
        return forks_of_completions(matched, None)


def joined_turns(records: list[RolloutRecord], matched: Matched, *, own: bool, present: Provenance) -> Tensor:
    """Join the records of each completion's turns, in place.

    A completion whose turns cannot be joined gets a record with a fault.

    Args:
        records: The records of all calls of the engine for this batch.
        matched: What `matched_turns` returned.
        own: Whether a user's `rollout_func` generated.
        present: Where rollouts of the present weights come from.

    Returns:
        This process's part of what `turn_metrics` reads.

    Raises:
        RecordError: Not one of several completions can be joined.
        RoutingError: As RecordError, if the routes of all completions are the reason.
    """
    try:
        joined = matched.join(every_turn=not own)
        parts, rows = [joined], joined.records
    except MismatchError as error:
        parts, rows = _joined_one_by_one(matched, present, error)
    records[:] = rows
    counts = [sum(part.turns for part in parts), sum(len(part.records) for part in parts)]
    counts += [sum(getattr(part, name) for part in parts) for name in ROWS]
    return torch.tensor(counts, dtype=torch.float64)


def turn_metrics(sums: Tensor, *, routed: bool) -> dict[str, float]:
    """Return the metrics of the completions of all processes, from the sum of what `joined_turns` returned on each."""
    turns, completions, *rows = sums.tolist()
    metrics = {"turns": turns / max(completions, 1.0)}
    if routed:
        metrics |= {f"routing/{name}": count for name, count in zip(ROWS, rows, strict=True)}
    return metrics


def _joined_one_by_one(
    matched: Matched, present: Provenance, error: MismatchError
) -> tuple[list[Joined], list[RolloutRecord]]:
    """Join each completion's turns apart from the others', so that a fault stays with its completion."""
    parts: list[Joined] = []
    rows: list[RolloutRecord] = []
    bad = BadRows(len(matched.rows))
    for number, joined in enumerate(matched.join_each()):
        if isinstance(joined, Joined):
            parts.append(joined)
            rows += joined.records
            continue
        bad.add(number, _reason(joined, matched, number), str(joined))
        rows.append(_record_with(bad.faults[number], matched.rows[number].trained, present))
    if bad.spoil_all or not len(bad):
        # All completions have a fault, or no single one has: that is no fault of one row.
        raise error
    return parts, rows


def _reason(error: MismatchError, matched: Matched, number: int) -> str:
    """Return why the turns of a completion cannot be joined, as one of `mismatch_ext.events.BAD_ROW_REASONS`."""
    if isinstance(error, RoutingError):
        return "routes"
    return "tokens" if matched.has_one_version(number) else "weight_version"


def _record_with(fault: Fault, completion: Trained, present: Provenance) -> RolloutRecord:
    return RolloutRecord(
        prompt_ids=completion.prompt_ids,
        response_ids=completion.response_ids,
        rollout_logprobs=np.zeros(len(completion.response_ids)),
        response_mask=completion.response_mask,
        finish_reason=None,
        provenance=present,
        fault=fault,
    )


def _trained(output: Sequence[Any]) -> list[Trained]:
    """Return the completions of what `_generate` returns: prompts, completions, masks, messages, log-probabilities."""
    prompts, completions, masks, _, logprobs = output[:5]
    rows = zip(
        prompts,
        completions,
        [[1] * len(ids) for ids in completions] if masks is None else masks,
        [None] * len(completions) if logprobs is None else logprobs,
        strict=True,
    )
    return [
        Trained(
            prompt_ids=to_ids(prompt, "a prompt"),
            response_ids=to_ids(completion, "a completion"),
            response_mask=to_flags(mask, "a completion"),
            # In an array of floats, None is NaN.
            rollout_logprobs=None if values is None else np.array(values, dtype=np.float64),
        )
        for prompt, completion, mask, values in rows
    ]
