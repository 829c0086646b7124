"""Sampling masks of trained rows, put together from the masks of the calls that sampled them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from mismatch_ext.errors import RecordError
from mismatch_ext.sampling_mask.support import TokenSupport, join
from mismatch_ext.turns.rows import Trained, near


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """One call of the engine.

    Args:
        prompt_ids: Token ids that the engine was given.
        response_ids: Token ids that the engine sampled `[T]`.
        rollout_logprobs: Log-probabilities of the sampled tokens, nats `[T]`; empty if the engine was not asked for them.
        support: The ids that each token was sampled from, or the reason why they are unknown; None if nobody asked for them.
    """

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    rollout_logprobs: tuple[float, ...]
    support: TokenSupport | str | None = None


class Calls:
    """The calls of the engine for one conversation.

    Each call is given the whole conversation so far. Of that, only the tokens that the previous call did not have are stored.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[int, Sampled]] = []
        self._last: tuple[int, ...] = ()

    def add(
        self,
        prompt_ids: Sequence[int],
        response_ids: Sequence[int],
        rollout_logprobs: Sequence[float] | None,
        support: TokenSupport | str | None = None,
    ) -> None:
        """Note a call; the arguments are those of `Sampled`, with None if there are no log-probabilities."""
        prompt, response = tuple(prompt_ids), tuple(response_ids)
        same = beginning(self._last, prompt)
        kept = Sampled(
            prompt_ids=prompt[same:],
            response_ids=response,
            rollout_logprobs=tuple(rollout_logprobs or ()),
            support=support,
        )
        self._kept.append((same, kept))
        self._last = prompt + response

    def __iter__(self) -> Iterator[Sampled]:
        last: tuple[int, ...] = ()
        for same, kept in self._kept:
            prompt = last[:same] + kept.prompt_ids
            yield replace(kept, prompt_ids=prompt)
            last = prompt + kept.response_ids


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


def beginning(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Return how many tokens two sequences share from the start; in most calls, one sequence is the beginning of the other."""
    least = min(len(one), len(other))
    if one[:least] == other[:least]:
        return least
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
