"""Sampling masks of trained rows, put together from the masks of the calls that sampled them."""

from __future__ import annotations

from mismatch_ext.errors import RecordError
from mismatch_ext.sampling_mask.support import TokenSupport, join
from mismatch_ext.turns.holding import Calls, Sampled, beginning
from mismatch_ext.turns.rows import Trained, near


def masks_of(name: str, one: Trained, calls: Calls) -> TokenSupport:
    """Return the token ids that each token of a row's response was sampled from; no ids where the policy sampled nothing.

    If several calls were given the same tokens, the mask comes from the call whose log-probabilities and tokens the row has,
    because another call may have sampled the same token with other weights.

    Args:
        name: What to call the row in messages.
        one: The row.
        calls: All calls of the conversation that the row belongs to.

    Raises:
        RecordError: A call's mask is not known, or one of the policy's tokens has no mask; names row and token.
    """
    first, tokens = len(one.prompt_ids), one.prompt_ids + one.response_ids
    parts: list[TokenSupport] = []
    at = first
    for call in sorted(calls, key=lambda call: (len(call.prompt_ids), *_apart(one, call))):
        start = len(call.prompt_ids)
        if call.prompt_ids != tokens[:start]:
            continue
        stop, begin = start + _same(one, call), max(at, start)
        if stop <= begin or not any(one.response_mask[begin - first : stop - first]):
            continue
        if not isinstance(support := call.support, TokenSupport):
            raise RecordError(support or f"completion {name}: the engine sent no sampling masks with its answer.")
        parts += [TokenSupport.empty(begin - at, support.vocabulary), support.slice(begin - start, stop - start)]
        at = stop
    if not parts and any(one.response_mask):
        raise RecordError(
            f"completion {name}: no call of the engine has sampled its tokens, so that they have no sampling masks."
        )
    vocabulary = parts[0].vocabulary if parts else 1
    found = join([*parts, TokenSupport.empty(len(tokens) - at, vocabulary)])
    found.check_sampled(one.response_ids, one.response_mask, name)
    return found


def _same(one: Trained, call: Sampled) -> int:
    """Return how many of a call's sampled tokens a row has; the row must have all tokens that the call was given."""
    tokens, start = one.prompt_ids + one.response_ids, len(call.prompt_ids)
    return beginning(call.response_ids, tokens[start : start + len(call.response_ids)])


def _apart(one: Trained, call: Sampled) -> tuple[int, int]:
    """Return a call's sort key: how many of its tokens the row has with another log-probability, then minus how many it has."""
    place, same = len(call.prompt_ids) - len(one.prompt_ids), _same(one, call)
    if place < 0:  # a call about the row's prompt
        return 0, -same
    theirs = (one.rollout_logprobs or ())[place : place + same]
    pairs = zip(call.rollout_logprobs, theirs, one.response_mask[place : place + same], strict=False)
    return sum(1 for ours, other, own in pairs if own and not near(ours, other)), -same
