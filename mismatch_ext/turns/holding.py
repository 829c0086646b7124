"""Comparison of a trained row with the engine's calls, for a host in which calls are seen but no record of them is kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from mismatch_ext.sampling_mask.support import TokenSupport
from mismatch_ext.turns.rows import Row, Trained, by_length, expect_one_version, moved, near


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """One call of the engine.

    Args:
        prompt_ids: Token ids that the engine was given.
        response_ids: Token ids that the engine sampled `[T]`.
        rollout_logprobs: Log-probabilities of the sampled tokens, nats `[T]`; empty if the engine was not asked for them.
        version: Version of the weights that sampled the tokens; None if unknown.
        support: The ids that each token was sampled from, or the reason why they are unknown; None if nobody asked for them.
    """

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    rollout_logprobs: tuple[float, ...]
    version: int | None
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
        version: int | None,
        support: TokenSupport | str | None = None,
    ) -> None:
        """Note a call; the arguments are those of `Sampled`, with None if there are no log-probabilities."""
        prompt, response = tuple(prompt_ids), tuple(response_ids)
        same = beginning(self._last, prompt)
        kept = Sampled(
            prompt_ids=prompt[same:],
            response_ids=response,
            rollout_logprobs=tuple(rollout_logprobs or ()),
            version=version,
            support=support,
        )
        self._kept.append((same, kept))
        self._last = prompt + response

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Sampled]:
        last: tuple[int, ...] = ()
        for same, kept in self._kept:
            prompt = last[:same] + kept.prompt_ids
            yield replace(kept, prompt_ids=prompt)
            last = prompt + kept.response_ids


def expect_sampled(name: str, one: Trained, calls: Calls, *, one_version: bool) -> None:
    """Refuse a row unless, for each of the policy's tokens, some call sampled it after exactly the tokens that stand before it.

    Calls that sampled no token of the row are ignored: other candidates, turns of other rows, text that was cut off.

    Args:
        name: What to call the row in messages.
        one: The row.
        calls: All calls of the conversation that the row belongs to.
        one_version: Whether one version of the weights must have sampled all of the row's tokens.

    Raises:
        RecordError: Turns were tokenised again or dropped, no call sampled a token, or a token is trained with another
            log-probability than the engine reported; names row, turn and token.
        ProvenanceError: Several versions of the weights sampled the tokens; names two.
    """
    first, tokens = len(one.prompt_ids), one.prompt_ids + one.response_ids
    counted = {place for place, own in enumerate(one.response_mask, first) if own}
    missing, settled = set(counted), set()
    others: dict[int, tuple[float, float | None]] = {}
    versions: list[int | None] = []
    for call in calls:
        start = len(call.prompt_ids)
        if call.prompt_ids != tokens[:start]:
            continue
        stop = start + beginning(call.response_ids, tokens[start : start + len(call.response_ids)])
        places = [place for place in range(start, stop) if place in counted]
        versions += [call.version] * bool(places)
        missing.difference_update(places)
        for place in places:
            theirs = None if one.rollout_logprobs is None else one.rollout_logprobs[place - first]
            if not call.rollout_logprobs or near(ours := call.rollout_logprobs[place - start], theirs):
                settled.add(place)
            else:
                others.setdefault(place, (ours, theirs))
    if missing:
        row = Row[Sampled](name, one, None)
        waiting = by_length(list(calls))
        row.take_from(waiting)
        row.expect_covered([call for some in waiting.values() for _, call in some])
        raise row.unsampled(min(missing))
    if apart := sorted(set(others) - settled):
        raise moved(name, apart[0] - first, *others[apart[0]])
    if one_version:
        expect_one_version(name, versions)


def beginning(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Return how many tokens two sequences share from the start; in most calls, one sequence is the beginning of the other."""
    least = min(len(one), len(other))
    if one[:least] == other[:least]:
        return least
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
