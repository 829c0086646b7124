"""Completions that TRL joins from several calls of its engine: the calls' records are joined to one for each completion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mismatch_ext.adapters.transformers.chat import TokenizerChat

from mismatch_ext.chains.in_run import forks_of_completions
from mismatch_ext.errors import RecordError
from mismatch_ext.rollout import RolloutRecord
from mismatch_ext.turns import Matched, Trained, any_asked, match_turns


def matched_turns(records: list[RolloutRecord], output: Sequence[Any], *, own: bool, limit: int) -> Matched:
    """Give each completion the records of its turns; `own` if a user's `rollout_func` generated."""
    trained = _trained(output)
    if own and not any_asked(records, trained):
        raise RecordError(
            "a rollout_func returned completions that trainer.vllm_generation.generate has not sampled, whose weights and "
            "log-probabilities are not known; generate with it, not with trainer.vllm_generation.llm or an engine of your own."
        )
    return match_turns(records, trained, limit=None if own else limit)


def fork_metrics(matched: Matched, tokenizer: Any) -> dict[str, float]:
    """Return how many completions are not what their turns sampled, and why, if the tokenizer has a chat template."""
    has_template = bool(getattr(tokenizer, "chat_template", None))
    return forks_of_completions(matched, TokenizerChat(tokenizer) if has_template else None)


def joined_turns(records: list[RolloutRecord], matched: Matched, *, own: bool) -> dict[str, float]:
    """Join the records of each completion's turns, in place, and return metrics."""
    joined = matched.join(every_turn=not own)
    records[:] = joined.records
    metrics = {"turns": joined.turns / len(records)}
    if records[0].routing is not None:
        for name in ("sampled_rows", "prefilled_rows", "rerouted_rows"):
            metrics[f"routing/{name}"] = float(getattr(joined, name))
    return metrics


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
            prompt_ids=tuple(map(int, prompt)),
            response_ids=tuple(map(int, completion)),
            response_mask=tuple(map(bool, mask)),
            rollout_logprobs=None if values is None else tuple(values),
        )
        for prompt, completion, mask, values in rows
    ]
