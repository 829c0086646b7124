"""The tokens that were left to sample from, read off an engine's most likely ones after truncation."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mismatch_ext.errors import RecordError
from mismatch_ext.sampling_mask.support import TokenSupport


def support_of_top(
    top_ids: Sequence[Sequence[int]],
    top_logprobs: Sequence[Sequence[float | None]],
    *,
    asked: int,
    vocabulary: int,
    name: str = "",
) -> TokenSupport:
    """Return what was left to sample from, by an engine's most likely tokens of each position and their log-probabilities.

    Log-probabilities from after truncation (vLLM's `logprobs_mode="processed_logprobs"`) are -inf for what was cut off. Where
    one of the tokens that were asked for is cut off, every token that is left is among them: the support is the engine's own,
    exactly.

    Args:
        top_ids: Ids of each position, the sampled token's among them.
        top_logprobs: Their log-probabilities after truncation, in the same order.
        asked: Most likely tokens that were asked for per position, the sampled one not counted.
        vocabulary: Tokens that the engine's logits are over.
        name: The response's name.

    Raises:
        RecordError: None of the tokens asked for is cut off, so that there may be more; or a position has no log-probability.
    """
    rows = []
    for token, (ids, logprobs) in enumerate(zip(top_ids, top_logprobs, strict=True)):
        left = [one for one, value in zip(ids, logprobs, strict=True) if value is not None and value > -math.inf]
        # Where none is cut off there may be more, however few were reported.
        known = len(left) < len(ids) and len(left) < min(asked, vocabulary)
        if not known and len(left) < vocabulary:
            raise RecordError(
                f"rollout {name}, token {token}: at least {len(left)} tokens were left to sample from, and the engine was asked "
                f"for {asked}: what is left is not known. Raise mismatch.sampling_mask.max_support above {asked}, or truncate "
                "harder (top_k)."
            )
        if not left:
            raise RecordError(f"rollout {name}, token {token}: the engine reported no token that could be sampled.")
        rows.append(left)
    return TokenSupport.from_lists(rows, vocabulary, name)
