"""Rows that are trained on, held to the calls of the engine that sampled them, where the calls are seen and no record is kept."""

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
        prompt_ids: Token ids that it was given.
        response_ids: Token ids that it sampled `[T]`.
        rollout_logprobs: Their log-probabilities, nats `[T]`; empty where the engine was not asked for them.
        version: Version of the weights that sampled them; None when unknown.
        support: What was left to sample from for each of them, or why that is not known; None where nobody has asked.
    """

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    rollout_logprobs: tuple[float, ...]
    version: int | None
    support: TokenSupport | str | None = None


class Calls:
    """The calls that an engine was asked for one conversation.

    Each is given all of the conversation so far: of what it was given, the tokens are kept that the call before did not have.
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
        """Note a call; the arguments are those of `Sampled`, and None where there are no log-probabilities."""
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
    """Refuse a row in which a token of the policy's is not one that a call sampled, behind the very tokens that stand before it.

    Calls that lead to no token of the row are left out: other candidates, other rows' turns, what was cut off.

    Args:
        name: What to call the row in messages.
        one: The row.
        calls: All calls of the conversation that the row is of.
        one_version: Whether its tokens have to be of one version of the weights.

    Raises:
        RecordError: Turns were tokenised anew or dropped, nobody has sampled a token, or it is trained with another
            log-probability than the engine reported; names row, turn and token.
        ProvenanceError: Tokens are of several versions; names two.
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
    """Return the number of tokens up to the first that differs; most are the beginning of one another."""
    least = min(len(one), len(other))
    if one[:least] == other[:least]:
        return least
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
