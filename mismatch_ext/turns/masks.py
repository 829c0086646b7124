"""Sampling masks of rows that are trained on, put together from those of the calls that sampled them."""

from __future__ import annotations

from mismatch_ext.errors import RecordError
from mismatch_ext.sampling_mask.support import TokenSupport, join
from mismatch_ext.turns.holding import Calls, beginning
from mismatch_ext.turns.rows import Trained


def masks_of(name: str, one: Trained, calls: Calls) -> TokenSupport:
    """Return what was left to sample from at each token of a row's response; nothing where no call has sampled it.

    Of a token that two calls have sampled behind the same tokens, the mask is the first one's: both had the same to choose from.

    Args:
        name: What to call the row in messages.
        one: The row.
        calls: All calls of the conversation that the row is of.

    Raises:
        RecordError: A call's mask is not known, or a token of the policy's has none; names row and token.
    """
    first, tokens = len(one.prompt_ids), one.prompt_ids + one.response_ids
    parts: list[TokenSupport] = []
    at = first
    for call in sorted(calls, key=lambda call: len(call.prompt_ids)):
        start = len(call.prompt_ids)
        if call.prompt_ids != tokens[:start]:
            continue
        stop = start + beginning(call.response_ids, tokens[start : start + len(call.response_ids)])
        if stop <= max(at, start):
            continue
        if not isinstance(call.support, TokenSupport):
            raise RecordError(call.support or f"completion {name}: the engine sent no sampling masks with its answer.")
        support, begin = call.support, max(at, start)
        parts += [TokenSupport.empty(begin - at, support.vocabulary), support.slice(begin - start, stop - start)]
        at = stop
    if not parts:
        raise RecordError(
            f"completion {name}: no call of the engine has sampled its tokens, so that they have no sampling masks."
        )
    found = join([*parts, TokenSupport.empty(len(tokens) - at, parts[0].vocabulary)])
    found.check_sampled(one.response_ids, one.response_mask, name)
    return found
